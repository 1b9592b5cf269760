//! The steps of attention against plain loops, on each instruction set that this CPU has.

mod mask;
mod rows;
mod scores;
mod softmax;

use super::*;
use crate::kernels::reference::element;
use crate::testing::{Aligned, Guarded, Random};

const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0];

/// Rows of the cache, the last of which ends where memory ends.
struct Cache {
    bytes: Guarded,
    source: Source,
}

impl Cache {
    /// `rows` rows of `d` elements (rounded up to whole blocks) with some bytes between them.
    fn new(dtype: DType, [rows, d]: [usize; 2], rng: &mut Random, element: impl Fn(&mut Random) -> f32) -> Self {
        let d = d.next_multiple_of(dtype.block());
        let stride = dtype.row_bytes(d) + 2 * rng.below(40);
        let mut bytes = vec![0xff; (rows - 1) * stride + dtype.row_bytes(d)];
        for row in bytes.chunks_mut(stride) {
            let values: Vec<f32> = (0..d).map(|_| element(rng)).collect();
            row[..dtype.row_bytes(d)].copy_from_slice(&crate::testing::bytes(dtype, &values));
        }
        let bytes = Guarded::new(&bytes);
        let source = Source { dtype, data: bytes.as_ptr(), stride, rows, d, closed: 0 };
        Self { bytes, source }
    }

    /// Element `i` of a row.
    fn get(&self, row: usize, i: usize) -> f32 {
        // SAFETY: inside the rows.
        unsafe { element(self.source.dtype, self.bytes[row * self.source.stride..].as_ptr(), i) }
    }
}

/// Memory for `n` f32, filled.
fn floats(n: usize, mut value: impl FnMut(usize) -> f32) -> Aligned {
    let memory = Aligned::new(4 * n);
    // SAFETY: `n` f32 of ours.
    (0..n).for_each(|i| unsafe { *memory.ptr().cast::<f32>().add(i) = value(i) });
    memory
}

/// Equal, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

#[test]
fn panels_cover_all_rows() {
    for rows in 1..200 {
        let mut left = rows;
        while left > 0 {
            let lanes = panel_lanes(left);
            assert!(lanes.is_power_of_two() && lanes <= LANES);
            left = left.saturating_sub(lanes);
        }
    }
    assert_eq!((panel_lanes(12), panel_lanes(8), panel_lanes(6)), (8, 8, 8));
}
