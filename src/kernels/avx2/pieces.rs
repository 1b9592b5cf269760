//! In which pieces the panel products go by rows and columns.

use crate::isa::Reading;
use crate::pack::Panels;
use crate::tensor::Rows;

/// Rows of a register block: with the two vectors of a panel's lanes, 12 sums, and four registers for the rest.
pub const ROWS: usize = 6;

/// Some columns of rows `[i, i + n)`, times all panels.
pub struct Piece<'a> {
    /// These columns of all rows.
    pub rows: Rows<'a>,
    /// These columns of the tokens.
    pub panels: Panels<'a>,
    /// The first row.
    pub i: usize,
    /// Rows, at most [`ROWS`].
    pub n: usize,
    /// Whether there were columns before.
    pub more: bool,
}

/// All pieces of a product, with `k_block` columns each.
///
/// With few panels the rows go by in the order of memory. With many it is columns first: these columns of all panels
/// then stay in the L2 cache while the rows go by.
pub fn pieces<'a>(rows: Rows<'a>, panels: Panels<'a>, k_block: usize) -> impl Iterator<Item = Piece<'a>> {
    let (groups, parts) = (rows.n.div_ceil(ROWS), rows.k.div_ceil(k_block).max(1));
    let by_rows = panels.count() <= 2;
    (0..groups * parts).map(move |item| {
        let (group, part) = if by_rows { (item / parts, item % parts) } else { (item % groups, item / groups) };
        // As even as can be: with few rows there are not sums enough to hide the latency of an addition.
        let (i, end) = (rows.n * group / groups, rows.n * (group + 1) / groups);
        let k0 = part * k_block;
        let k = k_block.min(rows.k - k0);
        let next = if by_rows {
            rows.next.wrapping_add(rows.dtype.row_bytes(k0))
        } else if part + 1 < parts {
            rows.columns(k0 + k, 0).data
        } else {
            rows.next
        };
        let (panels, more) = (panels.columns(k0, k), k0 > 0);
        // What comes next is not near: other columns or other panels are first.
        Piece { rows: rows.columns(k0, k).then(next).by(Reading::Stretch), panels, i, n: end - i, more }
    })
}

/// Runs an expression in which `$rows` is a constant, as what `$n` is (from 1 to [`ROWS`]).
macro_rules! for_rows {
    ($n:expr, |$rows:ident| $run:expr) => {
        for_rows!($n, $rows, $run, [1 2 3 4 5 6])
    };
    ($n:expr, $rows:ident, $run:expr, [$($each:literal)*]) => {
        match $n {
            $($each => {
                const $rows: usize = $each;
                $run
            })*
            _ => unreachable!("a piece has at most {} rows", $crate::kernels::avx2::pieces::ROWS),
        }
    };
}
pub(super) use for_rows;
