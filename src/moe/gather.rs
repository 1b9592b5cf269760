//! Packed tokens of all experts, and transform (a) that fills them: gather, convert, write panels and token rows.

use super::Carver;
use super::routing::{Active, Pair, Routing};
use crate::isa::Bf16Form;
use crate::kernels::{Engine, Vectors};
use crate::pack::{MAX_TOKEN_ROWS, PANEL, Panels, TokenRows, panel_bytes, token_row_bytes};
use crate::team::Worker;
use crate::tensor::DType;

/// The packed tokens of all active experts: all panels, then all token rows.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// The weights' type, and the rows'.
    dtype: DType,
    k: usize,
    /// The type of an expert's only panel, and of several.
    forms: [DType; 2],
    panels: *mut u8,
    rows: *mut u8,
}

/// Panels of the next expert that are brought near: those that meet its weights as they come from memory.
const MOST_AHEAD: usize = 4;

impl Packed {
    /// Takes room for any routing of `pairs` pairs over `experts` experts, whatever an engine makes of it.
    pub fn carve(carver: &mut Carver, dtype: DType, k: usize, pairs: usize, experts: usize) -> Self {
        let active = pairs.min(experts);
        let panel = panel_bytes(dtype, k).max(panel_bytes(DType::Bf16, k));
        let panels = carver.take((pairs / PANEL + active) * panel);
        let rows = carver.take(pairs.min(active * MAX_TOKEN_ROWS) * token_row_bytes(dtype, k));
        Self { dtype, k, forms: [dtype; 2], panels, rows }
    }

    /// The same as an engine wants it.
    pub fn on(self, engine: impl Engine) -> Self {
        Self { forms: [PANEL, 2 * PANEL].map(|tokens| engine.panel_dtype(self.dtype, tokens)), ..self }
    }

    /// The weights' type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Columns of the weights.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The type of an expert's panels.
    pub fn panel_dtype(&self, a: &Active) -> DType {
        self.forms[usize::from(a.lanes() > PANEL)]
    }

    /// Bytes from a panel to the next, of whatever type.
    fn panel_bytes(&self) -> usize {
        let [one, more] = self.forms.map(|dtype| panel_bytes(dtype, self.k));
        one.max(more)
    }

    /// Address of an expert's panel `p`.
    pub fn panel(&self, a: &Active, p: usize) -> *mut u8 {
        self.panels.wrapping_add((a.panels_before + p) * self.panel_bytes())
    }

    /// Address of an expert's token row `j`.
    pub fn row(&self, a: &Active, j: usize) -> *mut u8 {
        self.rows.wrapping_add((a.rows_before + j) * token_row_bytes(self.dtype, self.k))
    }

    /// Panels `[p, p + n)` of an expert.
    ///
    /// # Safety
    /// They were written, and nobody writes them during `'a`.
    // SAFETY: contract above.
    pub unsafe fn panels<'a>(&self, a: &Active, p: usize, n: usize) -> Panels<'a> {
        let tokens = (n * PANEL).min(a.lanes() - p * PANEL);
        // SAFETY: the caller's promise; the area has room for all panels of the routing.
        unsafe { Panels::from_raw(self.panel_dtype(a), self.panel(a, p), self.k, tokens).apart(self.panel_bytes()) }
    }

    /// Panels behind which those of another expert come.
    pub fn then<'a>(&self, panels: Panels<'a>, a: &Active) -> Panels<'a> {
        panels.then(self.panel(a, 0), a.panels().min(MOST_AHEAD) * self.panel_bytes())
    }

    /// The token rows of an expert that has some, packed in this form.
    ///
    /// # Safety
    /// As [`Packed::panels`].
    // SAFETY: contract above.
    pub unsafe fn rows<'a>(&self, a: &Active, form: Bf16Form) -> TokenRows<'a> {
        // SAFETY: as above.
        unsafe { TokenRows::from_raw((self.dtype, form), self.row(a, 0), self.k, a.rows) }
    }
}

/// Packs this worker's share of the pairs: those panels and rows whose first pair is in the share.
///
/// # Safety
/// `source` gives the address of `packed.k` f32 for each pair; `packed` was carved for at least this routing; the team's
/// workers all call this with the same routing.
// SAFETY: contract above.
pub unsafe fn gather(
    v: impl Vectors,
    w: &Worker<'_>,
    routing: &Routing<'_>,
    source: &impl Fn(Pair) -> *const f32,
    packed: &Packed,
) {
    let share = w.share(routing.pairs.len());
    let (dtype, k) = (packed.dtype, packed.k);
    for a in routing.active {
        if a.first + a.count <= share.start {
            continue;
        }
        if a.first >= share.end {
            break;
        }
        let (lanes, rows) = routing.of(a).split_at(a.lanes());
        for (p, tokens) in lanes.chunks(PANEL).enumerate() {
            if share.contains(&(a.first + p * PANEL)) {
                let mut addresses = [std::ptr::null(); PANEL];
                addresses.iter_mut().zip(tokens).for_each(|(a, &pair)| *a = source(pair));
                // SAFETY: rows of x; the panel is inside the area and only this worker's.
                unsafe { v.panel(packed.panel_dtype(a), k, &addresses[..tokens.len()], packed.panel(a, p)) };
            }
        }
        for (j, &pair) in rows.iter().enumerate() {
            if share.contains(&(a.first + lanes.len() + j)) {
                // SAFETY: as above.
                unsafe { v.token_row(dtype, k, source(pair), 0, k, packed.row(a, j)) };
            }
        }
    }
}
