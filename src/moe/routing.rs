//! Tokens by expert.

use std::marker::PhantomData;

use super::{Carver, OpError};
use crate::pack::{MAX_TOKEN_ROWS, PANEL};

/// The router's choice: i32 expert ids `[slot][token]` with strides, as ggml has them (`slot` is dimension 0).
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    data: *const u8,
    n_used: usize,
    n_tokens: usize,
    nb: [usize; 2],
    life: PhantomData<&'a [i32]>,
}

// SAFETY: a read-only view of memory that outlives 'a.
unsafe impl Send for Ids<'_> {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Ids<'_> {}

impl<'a> Ids<'a> {
    /// A view of ids with strides in bytes: `nb[0]` from slot to slot, `nb[1]` from token to token.
    ///
    /// # Safety
    /// Each of the `n_used * n_tokens` ids is readable for `'a` whenever an operation reads it.
    // SAFETY: contract above.
    pub unsafe fn from_raw(data: *const u8, n_used: usize, n_tokens: usize, nb: [usize; 2]) -> Self {
        Self { data, n_used, n_tokens, nb, life: PhantomData }
    }

    /// Experts for each token.
    pub fn n_used(&self) -> usize {
        self.n_used
    }

    /// Tokens.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Pairs of slot and token.
    pub fn pairs(&self) -> usize {
        self.n_used * self.n_tokens
    }

    /// The id in `slot` of `token`.
    pub fn get(&self, slot: usize, token: usize) -> i32 {
        debug_assert!(slot < self.n_used && token < self.n_tokens);
        // SAFETY: inside the view, by its contract.
        unsafe { self.data.add(slot * self.nb[0] + token * self.nb[1]).cast::<i32>().read_unaligned() }
    }
}

/// One use of an expert: the token and which of the token's slots it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Token.
    pub token: u32,
    /// Slot of the token.
    pub slot: u32,
}

/// An expert that has tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Active {
    /// Expert.
    pub expert: usize,
    /// Its first pair in [`Routing::pairs`].
    pub first: usize,
    /// Number of its pairs, at least one.
    pub count: usize,
    /// How many of them, the last ones, are packed as rows; the others are lanes of panels.
    pub rows: usize,
    /// Panels of the experts before it.
    pub panels_before: usize,
    /// Token rows of the experts before it.
    pub rows_before: usize,
}

impl Active {
    /// Pairs that are lanes of panels.
    pub fn lanes(&self) -> usize {
        self.count - self.rows
    }

    /// Panels.
    pub fn panels(&self) -> usize {
        self.lanes().div_ceil(PANEL)
    }
}

/// The pairs of an operation sorted by expert; within an expert by token, then slot. Lives in scratch memory.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// Experts with tokens, ascending.
    pub active: &'a [Active],
    /// All pairs, expert by expert.
    pub pairs: &'a [Pair],
}

impl<'a> Routing<'a> {
    /// Bytes of scratch for `pairs` pairs and `experts` experts.
    pub fn scratch_bytes(pairs: usize, experts: usize) -> usize {
        Self::carve(std::ptr::null_mut(), pairs, experts).0
    }

    fn carve(scratch: *mut u8, pairs: usize, experts: usize) -> (usize, *mut u32, *mut Active, *mut Pair) {
        let mut carver = Carver::new(scratch);
        let (next, active, sorted) = (carver.take(experts), carver.take(experts.min(pairs)), carver.take(pairs));
        (carver.used, next, active, sorted)
    }

    /// Sorts the pairs by counting: `expert(slot, token)` is a pair's, `shape` is slots, tokens, experts. `dot_tokens` says how many of an expert's tokens are to be packed as rows
    /// ([`Engine::dot_tokens`](crate::kernels::Engine::dot_tokens)).
    ///
    /// # Errors
    /// [`OpError::ExpertId`] for the first id (by token, then slot) outside `[0, experts)`.
    ///
    /// # Safety
    /// `scratch` is 64-byte aligned and writable for [`Routing::scratch_bytes`] for `'a`, by this thread alone.
    // SAFETY: contract above.
    pub unsafe fn build(
        expert: &impl Fn(usize, usize) -> i32,
        [slots, tokens, experts]: [usize; 3],
        dot_tokens: impl Fn(usize) -> usize,
        scratch: *mut u8,
    ) -> Result<Self, OpError> {
        let n = slots * tokens;
        let (_, next, active, pairs) = Self::carve(scratch, n, experts);
        // SAFETY: the carved pieces are disjoint and ours; they are plain data and are written here before they are read.
        let (next, active, pairs) = unsafe {
            next.write_bytes(0, experts);
            active.write_bytes(0, experts.min(n));
            pairs.write_bytes(0, n);
            (
                std::slice::from_raw_parts_mut(next, experts),
                std::slice::from_raw_parts_mut(active, experts.min(n)),
                std::slice::from_raw_parts_mut(pairs, n),
            )
        };
        for token in 0..tokens {
            for slot in 0..slots {
                let id = expert(slot, token);
                let count = usize::try_from(id).ok().and_then(|e| next.get_mut(e));
                *count.ok_or(OpError::ExpertId { id, slot, token })? += 1;
            }
        }
        let (mut first, mut used, mut panels_before, mut rows_before) = (0, 0, 0, 0);
        for (expert, next) in next.iter_mut().enumerate() {
            let count = std::mem::replace(next, first as u32) as usize;
            if count > 0 {
                let rows = dot_tokens(count);
                debug_assert!(rows <= count.min(MAX_TOKEN_ROWS));
                let group = Active { expert, first, count, rows, panels_before, rows_before };
                active[used] = group;
                used += 1;
                first += count;
                panels_before += group.panels();
                rows_before += rows;
            }
        }
        for token in 0..tokens {
            for slot in 0..slots {
                // The ids may be changed under us by a broken caller: look the expert and the place up with checks.
                let id = expert(slot, token);
                let changed = OpError::ExpertId { id, slot, token };
                let next = usize::try_from(id).ok().and_then(|e| next.get_mut(e)).ok_or(changed)?;
                *pairs.get_mut(*next as usize).ok_or(changed)? = Pair { token: token as u32, slot: slot as u32 };
                *next += 1;
            }
        }
        Ok(Self { active: &active[..used], pairs })
    }

    /// The pairs of an active expert.
    pub fn of(&self, active: &Active) -> &'a [Pair] {
        &self.pairs[active.first..active.first + active.count]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::Aligned;

    fn ids(data: &[i32], n_used: usize, n_tokens: usize, stride: usize) -> Ids<'_> {
        assert!(n_tokens == 0 || data.len() >= stride * (n_tokens - 1) + n_used);
        // SAFETY: inside `data`, checked just now.
        unsafe { Ids::from_raw(data.as_ptr().cast(), n_used, n_tokens, [4, 4 * stride]) }
    }

    proptest! {
        #[test]
        fn every_pair_is_found_under_its_expert(
            experts in 1usize..40, n_used in 1usize..9, n_tokens in 0usize..40, gap in 0usize..3, seed: u64,
        ) {
            let stride = n_used + gap;
            let data: Vec<i32> =
                (0..stride * n_tokens).map(|i| ((seed.rotate_left(i as u32 * 7) ^ i as u64) % experts as u64) as i32).collect();
            let ids = ids(&data, n_used, n_tokens, stride);
            let scratch = Aligned::new(Routing::scratch_bytes(ids.pairs(), experts));
            // SAFETY: as large as asked for.
            let routing = unsafe { Routing::build(&|s, t| ids.get(s, t), [n_used, n_tokens, experts], |n| n % 16, scratch.ptr()) }.unwrap();
            let mut seen = 0;
            for expert in 0..experts {
                let want: Vec<Pair> = (0..n_tokens as u32)
                    .flat_map(|token| (0..n_used as u32).map(move |slot| Pair { token, slot }))
                    .filter(|p| ids.get(p.slot as usize, p.token as usize) == expert as i32)
                    .collect();
                let got = routing.active.iter().find(|a| a.expert == expert).map_or(&[][..], |a| routing.of(a));
                prop_assert_eq!(got, &want[..]);
                seen += got.len();
            }
            prop_assert_eq!(seen, ids.pairs());
            prop_assert!(routing.active.is_sorted_by_key(|a| a.expert));
        }

        #[test]
        fn an_id_out_of_range_is_an_error(bad in prop_oneof![Just(-1i32), Just(5), Just(i32::MIN), Just(i32::MAX)], at in 0usize..12) {
            let mut data = vec![4i32; 12];
            data[at] = bad;
            let ids = ids(&data, 3, 4, 3);
            let scratch = Aligned::new(Routing::scratch_bytes(12, 5));
            // SAFETY: as large as asked for.
            let got = unsafe { Routing::build(&|s, t| ids.get(s, t), [3, 4, 5], |_| 0, scratch.ptr()) }.unwrap_err();
            prop_assert_eq!(got, OpError::ExpertId { id: bad, slot: at % 3, token: at / 3 });
        }
    }
}
