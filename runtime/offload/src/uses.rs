//! Uses of streamed places: when the bytes of frozen weights come to the GPU, and when they leave it.
//!
//! ```text
//!  forward:   block 0 ─► block 1 ─► block 2 ─► …         a use of a place begins, or goes on with, a visit of its block
//!  backward:  … ─► block 2 ─► block 1 ─► block 0         recorded: the next visit, and the places that a visit uses
//!  GPU:       [ the visited block ][ window: the next places, in the recorded order ]
//! ```
//!
//! A place is a range of bytes that comes as a whole; nothing is copied back when it leaves. The places of a block leave when another block
//! is visited, unless the window reaches them again, as at the turn from a forward to its backward. Decisions only: no driver, no clock.
//!
//! Before anything is recorded, a forward is expected to visit the blocks in their order, and a backward in the reverse. A visit that was not
//! expected is served on demand, and recorded for the next time.

use std::collections::HashMap;

use glake_units::Bytes;

/// Kind of work that uses a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UsePhase {
    /// Forward without gradients.
    Evaluation,
    /// Forward that a backward may follow.
    Forward,
    /// Backward, with the recomputation in it.
    Backward,
}

/// A range of bytes that comes to the GPU as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Size on the GPU.
    pub bytes: Bytes,
    /// Number of the block that uses it.
    pub block: u32,
}

/// Places to move for a use, by their numbers: first all of `leave`, then `begin` in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UseOrders {
    /// Places whose memory on the GPU is freed.
    pub leave: Vec<usize>,
    /// Places whose copies to the GPU begin. The used place, if it is one of them, is the first.
    pub begin: Vec<usize>,
}

type Visit = (UsePhase, u32);

/// Recorded order of the uses of a program's places, and the places on the GPU.
///
/// ```
/// use glake_offload::{Place, UsePhase::Forward, Uses};
/// use glake_units::Bytes;
///
/// // Five blocks of one place each: a window of two of them beside the one in use.
/// let mut uses = Uses::new((0..5).map(|block| Place { bytes: Bytes::mib(100), block }).collect());
/// let orders = uses.used(0, Forward, true);
/// assert_eq!(orders.begin, [0, 1, 2]);
/// let orders = uses.used(1, Forward, false);
/// assert_eq!((orders.leave, orders.begin), (vec![0], vec![3]));
/// assert_eq!(uses.here(), Bytes::mib(300));
/// ```
#[derive(Clone, Debug)]
pub struct Uses {
    places: Vec<Place>,
    window: Bytes,
    here: Vec<bool>,
    /// Visit that followed a visit, the last time.
    next: HashMap<Visit, Visit>,
    /// Places that a visit used, in the order of their first uses, the last time.
    order: HashMap<Visit, Vec<usize>>,
    current: Option<Visit>,
    /// Places that the current visit has used so far.
    used: Vec<usize>,
    expected: u64,
    demanded: u64,
    begun: Bytes,
}

impl Uses {
    /// Creates an empty record for places that are all away. The window is twice the largest block.
    pub fn new(places: Vec<Place>) -> Uses {
        let mut blocks: HashMap<u32, Bytes> = HashMap::new();
        for place in &places {
            let bytes = blocks.entry(place.block).or_default();
            *bytes = bytes.saturating_add(place.bytes);
        }
        let largest = blocks.into_values().max().unwrap_or_default();
        Uses {
            window: largest.saturating_add(largest),
            here: vec![false; places.len()],
            places,
            next: HashMap::new(),
            order: HashMap::new(),
            current: None,
            used: Vec::new(),
            expected: 0,
            demanded: 0,
            begun: Bytes::ZERO,
        }
    }

    /// Returns the number of places.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns whether there are no places.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Records the use of a place. `is_first`: a new forward begins with it, before which the caller has freed everything on the GPU. Returns
    /// no orders for an unknown place.
    pub fn used(&mut self, place: usize, phase: UsePhase, is_first: bool) -> UseOrders {
        let Some(&Place { block, .. }) = self.places.get(place) else { return UseOrders::default() };
        if is_first {
            self.ends();
            self.here.fill(false);
        }
        let visit = (phase, block);
        let is_new = self.current != Some(visit);
        if is_new {
            self.visits(visit);
        }
        if !self.used.contains(&place) {
            self.used.push(place);
        }
        let mut begin = Vec::new();
        if self.here[place] {
            self.expected += 1;
            if !is_new {
                // The places ahead are those of the visit.
                return UseOrders::default();
            }
        } else {
            self.demanded += 1;
            self.here[place] = true;
            begin.push(place);
        }
        let ahead = self.ahead(visit);
        let is_kept = |other: usize| self.places[other].block == block || ahead.contains(&other);
        let leave: Vec<usize> =
            (0..self.here.len()).filter(|other| self.here[*other] && !is_kept(*other)).collect();
        for &other in &leave {
            self.here[other] = false;
        }
        for other in ahead {
            if !std::mem::replace(&mut self.here[other], true) {
                begin.push(other);
            }
        }
        let begun: Bytes = begin.iter().map(|place| self.places[*place].bytes).sum();
        self.begun = self.begun.saturating_add(begun);
        UseOrders { leave, begin }
    }

    /// Ends a pass: no visit follows the current one.
    fn ends(&mut self) {
        if let Some(last) = self.current.take() {
            self.order.insert(last, std::mem::take(&mut self.used));
            self.next.remove(&last);
        }
    }

    fn visits(&mut self, visit: Visit) {
        if let Some(last) = self.current.replace(visit) {
            self.order.insert(last, std::mem::take(&mut self.used));
            // A backward after an evaluation is of an earlier forward.
            if last.0 == visit.0 || visit.0 == UsePhase::Backward && last.0 == UsePhase::Forward {
                self.next.insert(last, visit);
            } else {
                self.next.remove(&last);
            }
        }
        self.used.clear();
    }

    /// Returns the places that are expected next: the rest of the visited block, and those of the next visits within the window.
    fn ahead(&self, visit: Visit) -> Vec<usize> {
        let (mut ahead, mut bytes, mut at) = (self.order_of(visit), Bytes::ZERO, visit);
        let mut seen = vec![visit];
        while let Some(next) = self.next_of(at) {
            if seen.contains(&next) {
                break;
            }
            for place in self.order_of(next) {
                if self.places[place].block != visit.1 && !ahead.contains(&place) {
                    bytes = bytes.saturating_add(self.places[place].bytes);
                    if bytes > self.window {
                        return ahead;
                    }
                    ahead.push(place);
                }
            }
            seen.push(next);
            at = next;
        }
        ahead
    }

    /// Returns the recorded next visit; if the visit is new, the neighboring block.
    fn next_of(&self, visit: Visit) -> Option<Visit> {
        let (phase, block) = visit;
        if self.order.contains_key(&visit) {
            return self.next.get(&visit).copied();
        }
        let next = if phase == UsePhase::Backward { block.checked_sub(1) } else { block.checked_add(1) }?;
        self.places.iter().any(|place| place.block == next).then_some((phase, next))
    }

    /// Returns the places of a visit in the order of their uses; if the visit is new, as another phase uses them.
    fn order_of(&self, visit: Visit) -> Vec<usize> {
        use UsePhase::{Backward, Evaluation, Forward};
        let known = [visit.0, Forward, Evaluation, Backward].into_iter();
        let known =
            known.filter_map(|phase| self.order.get(&(phase, visit.1))).find(|order| !order.is_empty());
        known.cloned().unwrap_or_else(|| {
            (0..self.places.len()).filter(|place| self.places[*place].block == visit.1).collect()
        })
    }

    /// Returns the bytes on the GPU or on their way to it.
    pub fn here(&self) -> Bytes {
        self.places.iter().zip(&self.here).filter(|(_, here)| **here).map(|(place, _)| place.bytes).sum()
    }

    /// Returns the maximum bytes that come ahead of the block in use.
    pub fn window(&self) -> Bytes {
        self.window
    }

    /// Returns the bytes of all copies that were begun.
    pub fn begun(&self) -> Bytes {
        self.begun
    }

    /// Returns the number of uses whose place was on the GPU or on its way, and of those served on demand.
    pub fn served(&self) -> (u64, u64) {
        (self.expected, self.demanded)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::UsePhase::{Backward, Evaluation, Forward};
    use super::*;

    const MIB: fn(u64) -> Bytes = Bytes::mib;

    /// `blocks` blocks of two places, of 10 and 1 MiB.
    fn blocks(blocks: u32) -> Uses {
        let places = (0..blocks).flat_map(|block| [10, 1].map(|mib| Place { bytes: MIB(mib), block }));
        Uses::new(places.collect())
    }

    /// Uses places one after the other, and returns the bytes begun.
    fn run(uses: &mut Uses, phase: UsePhase, places: impl IntoIterator<Item = usize>, first: bool) -> u64 {
        let mut begun = 0;
        for (number, place) in places.into_iter().enumerate() {
            let orders = uses.used(place, phase, first && number == 0);
            begun += orders.begin.iter().map(|place| uses.places[*place].bytes.get()).sum::<u64>();
        }
        begun
    }

    #[test]
    fn a_pass_brings_each_place_once_a_phase_and_the_turn_brings_nothing() {
        let mut uses = blocks(8);
        for pass in 0..3 {
            // The first pass is expected in the order of the blocks.
            let begun = run(&mut uses, Forward, 0..16, true);
            assert_eq!(begun, MIB(88).get(), "pass {pass}");
            // Each block is computed again in its order, the last first: its bytes are still there, as are those of its neighbors.
            let order = (0..8).rev().flat_map(|block| [2 * block, 2 * block + 1]);
            let begun = run(&mut uses, Backward, order, false);
            let there = if pass == 0 { 11 } else { 33 };
            assert_eq!(begun, MIB(88 - there).get(), "pass {pass}");
            let (_, demanded) = uses.served();
            assert_eq!(demanded, pass + 1, "only the first use of a pass waits for all of its bytes");
        }
    }

    #[test]
    fn an_evaluation_and_a_skipped_block_are_served_and_the_rest_leaves() {
        let mut uses = blocks(6);
        run(&mut uses, Evaluation, 0..12, true);
        assert_eq!(uses.here(), MIB(11), "nothing is expected behind an evaluation");
        run(&mut uses, Evaluation, [0, 1, 2, 3], true);
        let orders = uses.used(8, Evaluation, false);
        assert_eq!((orders.leave, orders.begin[0]), (vec![2, 3, 4, 5, 6, 7], 8));
        assert_eq!(uses.here(), MIB(22), "the block and the one behind it");
        // The next time it is known.
        let orders = [0, 1, 2].map(|place| uses.used(place, Evaluation, place == 0));
        assert_eq!(orders[0].begin, [0, 1, 2, 3, 8]);
        assert_eq!(uses.used(99, Forward, false), UseOrders::default());
    }

    #[test]
    fn places_read_again_within_a_block_change_no_order() {
        let mut uses = blocks(4);
        for _ in 0..2 {
            run(&mut uses, Forward, 0..8, true);
            let order = (0..4).rev().flat_map(|block| [2 * block, 2 * block + 1, 2 * block + 1, 2 * block]);
            run(&mut uses, Backward, order, false);
        }
        assert_eq!(uses.served().1, 2);
    }

    #[test]
    fn an_accumulated_or_second_forward_is_expected_by_itself() {
        let mut uses = blocks(5);
        for _ in 0..3 {
            run(&mut uses, Forward, 0..10, true);
            run(&mut uses, Evaluation, 0..10, true);
            run(&mut uses, Backward, (0..10).rev(), false);
        }
        let (expected, demanded) = uses.served();
        assert_eq!(expected + demanded, 90);
        // The first of each forward; of a backward behind another's forward the first block, whose order is known.
        assert!(demanded <= 9, "{demanded}");
    }

    proptest! {
        #[test]
        fn a_used_place_is_here_and_memory_is_bounded(
            sizes in prop::collection::vec((1..50u64, 0..6u32), 1..24),
            program in prop::collection::vec((any::<usize>(), 0..3usize, prop::bool::weighted(0.1)), 1..200),
        ) {
            let mut sorted = sizes;
            sorted.sort_by_key(|(_, block)| *block);
            let places: Vec<Place> = sorted.iter().map(|(mib, block)| Place { bytes: MIB(*mib), block: *block }).collect();
            let mut uses = Uses::new(places.clone());
            let mut here = vec![false; places.len()];
            for (place, phase, first) in program {
                let place = place % places.len();
                if first {
                    here.fill(false);
                }
                let UseOrders { leave, begin } = uses.used(place, [Evaluation, Forward, Backward][phase], first);
                for &other in &leave {
                    prop_assert!(std::mem::replace(&mut here[other], false) && other != place);
                }
                for &other in &begin {
                    prop_assert!(!std::mem::replace(&mut here[other], true));
                }
                prop_assert!(here[place] && begin.iter().position(|other| *other == place).unwrap_or(0) == 0);
                let block = places[place].block;
                let ahead = || places.iter().zip(&here).filter(|(of, here)| **here && of.block != block);
                prop_assert!(ahead().map(|(of, _)| of.bytes).sum::<Bytes>() <= uses.window());
                let all = places.iter().zip(&here).filter(|(_, here)| **here).map(|(of, _)| of.bytes);
                prop_assert_eq!(all.sum::<Bytes>(), uses.here());
            }
        }
    }
}
