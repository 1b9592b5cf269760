//! The naive oracle of attention: one query row at a time, in f64.

use super::Params;
use crate::kernels::reference::element;

/// Row `(query, head, stream)` of the result.
///
/// A closed position is skipped whatever it holds; a row without open positions is zeros, as in ggml.
pub fn row(p: &Params<'_>, query: usize, head: usize, stream: usize) -> Vec<f64> {
    let mask = p.mask.map(|m| (m, m.row(query, head % m.ne[2], stream % m.ne[3])));
    // SAFETY: all elements below are inside the views, by their contract.
    let get =
        |view: &crate::tensor::View<'_>, row: *const u8, i: usize| f64::from(unsafe { element(view.dtype, row, i) });
    let heads = p.q.ne[2];
    let source = |view: &crate::tensor::View<'_>, position: usize| {
        view.row(position, head / (heads / view.ne[2]), stream / (p.q.ne[3] / view.ne[3]))
    };
    let q = p.q.row(query, head, stream);
    let slope = f64::from(super::slope(p.max_bias, heads, head));
    let score = |position: usize| {
        let bias = mask.map_or(0.0, |(view, row)| get(&view, row, position));
        if bias == f64::NEG_INFINITY {
            return None;
        }
        let k = source(&p.k, position);
        let dot: f64 = (0..p.q.ne[0]).map(|i| get(&p.q, q, i) * get(&p.k, k, i)).sum();
        let (scale, cap) = (f64::from(p.scale), f64::from(p.logit_softcap));
        let s = if cap == 0.0 { dot * scale } else { cap * (dot * scale / cap).tanh() };
        Some((position, s + slope * bias))
    };
    let scores: Vec<(usize, f64)> = (0..p.k.ne[1]).filter_map(score).collect();
    let sink = p.sinks.map_or(f64::NEG_INFINITY, |s| get(&s, s.data, head));
    let max = scores.iter().fold(sink, |m, s| m.max(s.1));
    let mut sum = if sink == f64::NEG_INFINITY { 0.0 } else { (sink - max).exp() };
    let mut out = vec![0.0; p.v.ne[0]];
    for (position, s) in scores {
        let weight = (s - max).exp();
        let v = source(&p.v, position);
        sum += weight;
        out.iter_mut().enumerate().for_each(|(i, o)| *o += weight * get(&p.v, v, i));
    }
    out.iter().map(|o| if sum == 0.0 { 0.0 } else { o / sum }).collect()
}
