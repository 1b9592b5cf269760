//! Attention on AVX-512, in f32: K and V blocks are widened once and then serve every query row of a tile.
//!
//! A *block* holds up to a few dozen cache positions as f32 in tiles of 16 positions x 16 elements, 1 KiB each:
//! `[position / 16][element / 16][position % 16][element % 16]`, zero past the last element and the last position. Every
//! inner loop then walks constant offsets, whatever the head size.
//!
//! A *panel* holds the query rows that share a vector: 16, 8, 4, 2 or 1 *lanes* (rows), and `16 / lanes` consecutive
//! elements of each, `[element group][row][element]`. One vector of the panel times one broadcast group of K gives partial
//! scores for all rows at once, so a group of 8 heads fills vectors as well as one of 16, and the sums across a vector are
//! log2(16 / lanes) steps for 16 positions.

mod ahead;
mod exp;
mod mask;
mod queries;
mod scores;
mod softmax;
mod weigh;
mod widen;

pub use ahead::Ahead;
pub use mask::{MaskBits, bias, mask_bits};
pub use queries::pack;
pub use scores::scores;
pub use softmax::{State, cap, softmax};
pub use weigh::{Weights, merge, weigh, weigh_in_place};
pub use widen::{Source, widen};

/// Lanes of a vector of f32, and positions and elements of a block's tile.
pub const LANES: usize = 16;
/// f32 values in a tile of 16 positions x 16 elements.
pub const TILE: usize = LANES * LANES;

/// f32 values in a block of `positions` rows of `d` elements.
pub const fn block_len(positions: usize, d: usize) -> usize {
    positions.div_ceil(LANES) * d.div_ceil(LANES) * TILE
}

/// f32 values in a panel of `lanes` query rows of `d` elements.
pub const fn panel_len(lanes: usize, d: usize) -> usize {
    lanes * d.next_multiple_of(LANES)
}

/// Lanes of the next panel when `rows` query rows are left: the widest that wastes little.
///
/// Rows that do not fill a power of two are split (12 = 8 + 4), except where a wider panel costs no more (11 to 15, 5 to 7, 3).
pub const fn panel_lanes(rows: usize) -> usize {
    match rows {
        13.. | 11 => 16,
        5..=12 => 8,
        3 | 4 => 4,
        _ => rows,
    }
}

/// Calls a function with a const lane count.
macro_rules! with_lanes {
    ($lanes:expr, $f:ident ( $($arg:expr),* )) => {
        match $lanes {
            1 => $f::<1>($($arg),*),
            2 => $f::<2>($($arg),*),
            4 => $f::<4>($($arg),*),
            8 => $f::<8>($($arg),*),
            _ => $f::<16>($($arg),*),
        }
    };
}
pub(crate) use with_lanes;

#[cfg(test)]
mod tests {
    use super::*;

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
}
