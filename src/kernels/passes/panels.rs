//! The passes of the panel form: a group of rows, times some panels.

use std::ops::RangeInclusive;

use super::Group;
use crate::pack::{PANEL, Panels, panel_bytes};
use crate::tensor::Rows;

/// Bytes of panels that all go by a group of rows before the next group: they stay in L2, and the rows in L1 or L2, however many of
/// both there are.
const IN_L2: usize = 384 << 10;

/// The panels in turn, as many at a time as stay in L2, but in `sizes`: the first one's number, and they.
pub fn some_in_l2<'a>(panels: Panels<'a>, sizes: RangeInclusive<usize>) -> impl Iterator<Item = (usize, Panels<'a>)> {
    let count = panels.count();
    let most = (IN_L2 / panel_bytes(panels.dtype, panels.k).max(1)).clamp(*sizes.start(), *sizes.end());
    let size = count.div_ceil(count.div_ceil(most));
    (0..count).step_by(size).map(move |p| (p, panels.some(p, size.min(count - p))))
}

/// A pass: a group of rows times some panels.
pub struct PanelPass<'a> {
    pub rows: Rows<'a>,
    pub group: Group,
    /// The first panel.
    pub x: *const u8,
    pub x_stride: usize,
    /// The first panel's sums of row 0.
    c: *mut f32,
    /// Whether to add to them.
    pub add: bool,
}

impl<'a> PanelPass<'a> {
    /// The pass of a group of rows and panels `[p, p + n)`, of which the product is for `c`.
    ///
    /// # Safety
    /// `c` is writable for the sums of all rows and panels.
    // SAFETY: contract above.
    pub unsafe fn new(rows: Rows<'a>, group: Group, (panels, p): (&Panels<'_>, usize), c: *mut f32, add: bool) -> Self {
        // SAFETY: the caller's promise.
        let c = unsafe { c.add(p * rows.n * PANEL) };
        Self { rows, group, x: panels.panel(p), x_stride: panels.stride, c, add }
    }

    /// Addresses of the group's rows.
    pub fn rows<const R: usize>(&self) -> [*const u8; R] {
        self.group.addresses(&self.rows)
    }

    /// The sums of the group's row `r` and the pass's panel `p`.
    #[inline(always)]
    pub fn c(&self, r: usize, p: usize) -> *mut f32 {
        self.c.wrapping_add((p * self.rows.n + self.group.row(r)) * PANEL)
    }
}

/// Makes a panel form of a kernel `pass::<rows, panels>`: for `$one` rows where there is one panel, for `$many` rows and up to `$most`
/// panels where there are more, and for 4 rows and 1.
macro_rules! panels_by_passes {
    ($(#[$doc:meta])* $name:ident, $features:literal, $one:expr, [$($one_rows:literal)*], $many:literal, $most:literal, [$($some:literal)*]) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As `Engine::product`, on a CPU with the features.
        // SAFETY: contract above.
        #[target_feature(enable = $features)]
        pub unsafe fn $name(
            rows: $crate::tensor::Rows<'_>,
            panels: $crate::pack::Panels<'_>,
            c: *mut f32,
            add: bool,
        ) {
            let side_by_side = if panels.count() == 1 { $one } else { $many };
            for (first, panels) in $crate::kernels::passes::some_in_l2(panels, $most..=usize::MAX) {
                // SAFETY: the C block of panel `first`.
                let c = unsafe { c.add(first * rows.n * $crate::pack::PANEL) };
                for group in $crate::kernels::passes::groups(&rows, [side_by_side, 4, 1]) {
                    let mut p = 0;
                    while p < panels.count() {
                        let some = $crate::kernels::passes::even_group(panels.count() - p, $most);
                        // SAFETY: the caller's C block; the group's rows and panels p .. p + some lie inside.
                        unsafe {
                            let part = $crate::kernels::passes::PanelPass::new(rows, group, (&panels, p), c, add);
                            match (group.n, some) {
                                $(($one_rows, 1) => pass::<$one_rows, 1>(part),)*
                                $(($many, $some) => pass::<$many, $some>(part),
                                  (4, $some) => pass::<4, $some>(part),
                                  (_, $some) => pass::<1, $some>(part),)*
                                _ => unreachable!("passes have at most {} panels", $most),
                            }
                        }
                        p += some;
                    }
                }
            }
        }
    };
}
pub(in crate::kernels) use panels_by_passes;
