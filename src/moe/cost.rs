//! The cost of products.

use std::ops::Add;

use super::Ids;
use crate::cost::Cost;
use crate::tensor::Weights;

/// Of all matrices of `w`, with `tokens` tokens in sum.
pub fn of_matrix(w: &Weights<'_>, tokens: usize) -> Cost {
    Cost { bytes: (w.experts * w.expert_bytes()) as u64, operations: 2 * (w.k * w.n * tokens) as u64 }
}

/// Of the experts that have tokens. Reads the ids, so it is for before the operation, whose result may overwrite them.
/// An id that is out of range counts for nothing.
pub fn of_experts(ids: &Ids<'_>, weights: &[Weights<'_>]) -> Cost {
    let mut used = vec![false; weights.first().map_or(0, |w| w.experts)];
    for token in 0..ids.n_tokens() {
        for slot in 0..ids.n_used() {
            let id = usize::try_from(ids.get(slot, token)).unwrap_or(usize::MAX);
            if let Some(used) = used.get_mut(id) {
                *used = true;
            }
        }
    }
    let experts = used.iter().filter(|u| **u).count() as u64;
    let one = |w: &Weights<'_>| Cost { bytes: experts * w.expert_bytes() as u64, ..of_matrix(w, ids.pairs()) };
    weights.iter().map(one).fold(Cost::default(), Add::add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn experts_count_once_and_pairs_each() {
        let ids = [0, 3, 3, 0, 3, 99, -1, 0];
        // SAFETY: a live array of 2 slots and 4 tokens.
        let ids = unsafe { Ids::from_raw(ids.as_ptr().cast(), 2, 4, [4, 8]) };
        let bytes = vec![0; 4 * 10 * 64 * 2];
        let w = Weights::contiguous(DType::Bf16, &bytes, [64, 10, 4]);
        let once = of_experts(&ids, &[w]);
        assert_eq!(once, Cost { bytes: 2 * 10 * 64 * 2, operations: 2 * 10 * 64 * 8 });
        assert_eq!(of_experts(&ids, &[w, w]), once + once);
        assert_eq!(of_matrix(&w, 3), Cost { bytes: 4 * 10 * 64 * 2, operations: 2 * 10 * 64 * 3 });
    }
}
