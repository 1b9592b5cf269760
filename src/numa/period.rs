//! Whether a placement repeats, and how (paper section 5: pages alternate between nodes with a period).

use std::collections::HashMap;
use std::ops::Range;

use super::NodeId;
use super::placement::{Pages, Placement};

/// Longest period in pages that is looked for: 32 nodes with 16 huge pages of 2 MiB each.
const LONGEST: usize = 32 * 16 * 512;

/// Runs that are looked at to find the period; whether all pages keep to it is checked after.
const ENOUGH_RUNS: usize = 1 << 12;

/// A rule that repeats along addresses: interleave, weighted interleave, huge pages in turn.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    /// Ends of the stretches of one period, from an address that is a multiple of it, in bytes; the last is the period.
    ends: Vec<(usize, NodeId)>,
}

impl Pattern {
    /// Runs of `run` bytes on each of `nodes` in turn.
    pub fn interleave(run: usize, nodes: &[NodeId]) -> Self {
        let mut pages = Vec::with_capacity(nodes.len());
        nodes.iter().enumerate().for_each(|(i, &node)| push(&mut pages, (i + 1) * run, node));
        Self { ends: pages }
    }

    /// The rule that most of a placement follows, if its pages come in turns: the commonest distance between runs of
    /// one node is taken for the period, and each page of it goes to the node seen there most.
    ///
    /// None if fewer than two periods are there, if one node holds all that is known, or if less than three quarters of the
    /// pages follow the rule.
    pub fn find(placement: &Placement) -> Option<Self> {
        let page = placement.page();
        let period = commonest_distance(placement)? / page;
        if period > LONGEST || 2 * period * page > placement.range().len() + 2 * page {
            return None;
        }
        let mut votes: Vec<Vec<(NodeId, usize)>> = vec![Vec::new(); period];
        placement.stretches(placement.range(), &mut |r, node| {
            let Some(node) = node else { return };
            for p in r.start / page..r.end.div_ceil(page) {
                let seen = &mut votes[p % period];
                match seen.iter_mut().find(|v| v.0 == node) {
                    Some(v) => v.1 += 1,
                    None => seen.push((node, 1)),
                }
            }
        });
        let (mut ends, mut agree, mut all) = (Vec::new(), 0, 0);
        for (p, seen) in votes.iter().enumerate() {
            let &(node, most) = seen.iter().max_by_key(|v| (v.1, std::cmp::Reverse(v.0)))?;
            push(&mut ends, (p + 1) * page, node);
            agree += most;
            all += seen.iter().map(|v| v.1).sum::<usize>();
        }
        (ends.len() > 1 && 4 * agree >= 3 * all).then_some(Self { ends })
    }

    /// Bytes after which the rule repeats.
    pub fn period(&self) -> usize {
        self.ends.last().map_or(1, |e| e.0)
    }

    /// Whether every known page of `range` is where the rule says.
    pub fn fits(&self, placement: &Placement, range: Range<usize>) -> bool {
        let mut fits = true;
        placement.stretches(range, &mut |r, node| {
            if fits && let Some(node) = node {
                self.stretches(r, &mut |_, ruled| fits &= ruled == Some(node));
            }
        });
        fits
    }
}

impl Pages for Pattern {
    fn stretches(&self, range: Range<usize>, f: &mut dyn FnMut(Range<usize>, Option<NodeId>)) {
        let period = self.period();
        let mut begin = range.start - range.start % period;
        let mut at = range.start;
        while at < range.end {
            for &(end, node) in &self.ends {
                let end = (begin + end).min(range.end);
                if end > at {
                    f(at..end, Some(node));
                    at = end;
                }
            }
            begin += period;
        }
    }
}

fn push(ends: &mut Vec<(usize, NodeId)>, end: usize, node: NodeId) {
    match ends.last_mut() {
        Some(last) if last.1 == node => last.0 = end,
        _ => ends.push((end, node)),
    }
}

/// The distance in bytes between the starts of one node's runs that is seen most often.
///
/// A node may have several runs in a period, so distances up to the fourth next run are counted too.
fn commonest_distance(placement: &Placement) -> Option<usize> {
    let page = placement.page();
    let mut starts: HashMap<NodeId, Vec<usize>> = HashMap::new();
    let (mut first, mut left) = (true, ENOUGH_RUNS);
    placement.stretches(placement.range(), &mut |r, node| {
        // The first run may be cut, so its start says nothing.
        if let (false, Some(node), 1..) = (first, node, left) {
            starts.entry(node).or_default().push(r.start / page * page);
            left -= 1;
        }
        first = false;
    });
    let mut seen: HashMap<usize, usize> = HashMap::new();
    for starts in starts.values() {
        for next in 1..=4 {
            let pairs = starts.iter().zip(starts.iter().skip(next));
            pairs.for_each(|(a, b)| *seen.entry(b - a).or_default() += 1);
        }
    }
    // Of distances seen about equally often, the shortest is the period: its multiples are seen one time less each.
    let most = seen.values().copied().max()?;
    seen.into_iter().filter(|&(_, n)| n >= most - most / 8).map(|(distance, _)| distance).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn interleave_of_any_run_is_found() {
        for nodes in [2, 3, 4, 8] {
            for run in [4096, 16384, 65536, 2 * MIB] {
                let p = Placement::interleaved(7 * 4096 + 32, 8 * nodes * run, 4096, run, nodes);
                let ids: Vec<NodeId> = (0..nodes as NodeId).collect();
                let found = Pattern::find(&p).unwrap();
                assert_eq!(found, Pattern::interleave(run, &ids), "{nodes} nodes, runs of {run}");
                assert!(found.fits(&p, p.range()));
            }
        }
    }

    #[test]
    fn weighted_interleave_is_found() {
        // Weights 3, 1 and 2, as `/sys/kernel/mm/mempolicy/weighted_interleave` would set.
        let rule = [0, 0, 0, 1, 2, 2];
        let p = Placement::made_up(123 * 4096, 4 * MIB, 4096, |at| Some(rule[at / 4096 % 6]));
        let found = Pattern::find(&p).unwrap();
        assert_eq!(found.period(), 6 * 4096);
        assert!(found.fits(&p, p.range()));
    }

    #[test]
    fn a_few_pages_elsewhere_do_not_hide_the_rule() {
        let p = Placement::made_up(0, 8 * MIB, 4096, |at| match at / 4096 {
            17 | 500 | 501 => Some(0),
            900 => None,
            page => Some((page % 2) as NodeId),
        });
        let found = Pattern::find(&p).unwrap();
        assert_eq!(found, Pattern::interleave(4096, &[0, 1]));
        assert!(!found.fits(&p, p.range()));
        assert!(found.fits(&p, 600 * 4096..2048 * 4096));
    }

    #[test]
    fn one_node_and_too_little_have_no_rule() {
        assert_eq!(Pattern::find(&Placement::interleaved(0, 8 * MIB, 4096, 4096, 1)), None);
        assert_eq!(Pattern::find(&Placement::interleaved(0, 3 * MIB, 4096, 2 * MIB, 2)), None);
        assert_eq!(Pattern::find(&Placement::made_up(0, MIB, 4096, |_| None)), None);
        let mixed = |at: usize| (at / 4096).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
        assert_eq!(Pattern::find(&Placement::made_up(0, 4 * MIB, 4096, |at| Some(mixed(at) as NodeId))), None);
    }

    proptest! {
        #[test]
        fn the_rule_and_the_placement_say_the_same(start in 0usize..1_000_000, nodes in 2usize..9, run in 1usize..20) {
            let p = Placement::interleaved(start, 1 << 20, 4096, run * 4096, nodes);
            let ids: Vec<NodeId> = (0..nodes as NodeId).collect();
            prop_assert!(Pattern::interleave(run * 4096, &ids).fits(&p, p.range()));
            if let Some(found) = Pattern::find(&p) {
                prop_assert!(found.fits(&p, p.range()));
            }
        }
    }
}
