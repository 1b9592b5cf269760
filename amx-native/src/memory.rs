//! Aligned memory and random values.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::arch::x86_64::*;

use half::{bf16, f16};

use ggml_hina::isa::Avx512;
use ggml_hina::kernels::Vectors;
use ggml_hina::pack::{PANEL, Panels, panel_bytes};
use ggml_hina::tensor::{DType, QK8_0};

/// Zeroed bytes, 64-byte aligned. Zeroed by the thread that makes them, so the pages lie on its NUMA node.
pub struct Aligned {
    ptr: *mut u8,
    layout: Layout,
}

impl Aligned {
    pub fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(64), 64).expect("a size that fits the address space");
        // SAFETY: the size is not zero.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: just allocated with this size.
        unsafe { ptr.write_bytes(0, layout.size()) };
        Self { ptr, layout }
    }

    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: zeroed at first, so initialised; lives as long as self.
        unsafe { std::slice::from_raw_parts(self.ptr, self.layout.size()) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.layout.size()) }
    }

    pub fn f32_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above; aligned for f32, of which every bit pattern is one.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.layout.size() / 4) }
    }

    pub fn f32(&self) -> &[f32] {
        // SAFETY: as above; aligned for f32, of which every bit pattern is one.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.layout.size() / 4) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.ptr, self.layout) }
    }
}

/// Random numbers, always the same (xorshift64*).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In [-1, 1).
    pub fn f32(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn vec(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.f32()).collect()
    }

    /// Fills `bytes` with weights: BF16 values, or Q8_0 blocks.
    pub fn weights(&mut self, dtype: DType, bytes: &mut [u8]) {
        // Drawing each value would take longer than all the rest: after 64 KiB (or blocks' worth) they repeat.
        let unit = dtype.row_bytes(dtype.block());
        let first = bytes.len().min((64 << 10) * unit);
        for block in bytes[..first].chunks_exact_mut(unit) {
            let value = self.f32();
            match dtype {
                DType::Q8_0 => {
                    block[..2].copy_from_slice(&f16::from_f32(value * 0.01).to_le_bytes());
                    block[2..][..QK8_0].fill_with(|| self.bits() as u8);
                }
                _ => block.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            }
        }
        let (first, rest) = bytes.split_at_mut(first);
        rest.chunks_mut(first.len().max(1)).for_each(|part| part.copy_from_slice(&first[..part.len()]));
    }
}

/// Tokens, packed as panels.
pub struct Packed {
    area: Aligned,
    dtype: DType,
    k: usize,
    tokens: usize,
}

impl Packed {
    pub fn new(avx512: Avx512, dtype: DType, k: usize, x: &[Vec<f32>]) -> Self {
        let bytes = panel_bytes(dtype, k);
        let area = Aligned::new(x.len().div_ceil(PANEL) * bytes);
        for (p, x) in x.chunks(PANEL).enumerate() {
            let tokens: Vec<_> = x.iter().map(|x| x.as_ptr()).collect();
            // SAFETY: k values a token; a panel of the area.
            unsafe { avx512.panel(dtype, k, &tokens, area.ptr().add(p * bytes)) };
        }
        Self { area, dtype, k, tokens: x.len() }
    }

    pub fn panels(&self) -> Panels<'_> {
        // SAFETY: the area was made for these.
        unsafe { Panels::from_raw(self.dtype, self.area.ptr(), self.k, self.tokens) }
    }
}

/// Reads whole groups of eight pages as fast as this thread can: 512-bit loads, the pages of a group side by side.
pub fn read_all(_: Avx512, bytes: &[u8]) -> u64 {
    // SAFETY: the token proves AVX-512.
    unsafe { read_groups(bytes) }
}

/// # Safety
/// AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
unsafe fn read_groups(bytes: &[u8]) -> u64 {
    const PAGE: usize = 4096;
    const STREAMS: usize = 8;
    let mut sums = [_mm512_setzero_si512(); STREAMS];
    for pages in bytes.as_chunks::<{ STREAMS * PAGE }>().0 {
        for line in (0..PAGE).step_by(64) {
            for (page, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a line of the group.
                let line = unsafe { _mm512_loadu_si512(pages.as_ptr().add(page * PAGE + line).cast()) };
                *sum = _mm512_xor_si512(*sum, line);
            }
        }
    }
    sums.into_iter().fold(0, |all, sum| all ^ xor_lanes(sum))
}

/// The exclusive or of all eight lanes.
#[target_feature(enable = "avx512f")]
fn xor_lanes(v: __m512i) -> u64 {
    let mut lanes = [0u64; 8];
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), v) };
    lanes.into_iter().fold(0, |all, lane| all ^ lane)
}
