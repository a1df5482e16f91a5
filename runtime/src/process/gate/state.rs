//! Who uses what, and what is being closed: pure. What is closed is no state of the gate's: it is what is evicted, which the regions
//! know ([`Evicted`]).
//!
//! ```text
//! use       begin ──► running ──end──►            begin ──closing, evicted──► an obstacle
//!                     │     ▲
//!              arrive ▼     │ go on: no closing, nothing evicted            all its threads have arrived: parked
//!                     parked ──on a vote: no──► running                     with yes, it stays parked
//! closing   close ──► waits for the uses that run ──► asks those that vote ──► moves ──► end        no new use meanwhile
//! ```
//!
//! Invariants: while a closing moves ([`GateState::running`] and [`GateState::open_votes`] are 0) no use that it touches runs: each was not there, or is parked, and
//! goes on only where no closing touches it and nothing of it is evicted. A use is admitted only where none of its tags is being
//! closed, nothing of them is evicted, and no parked use is about to go on: those come first.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use super::last_uses::LastUses;
use super::tags::Tags;

/// Names a use that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UseId(pub u64);

/// Names a closing that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClosingId(u64);

/// Who knows which memory is evicted. Asked under the gate's lock: it answers without a lock that anybody holds who calls the gate.
pub(in super::super) trait Evicted: fmt::Debug + Send + Sync {
    /// The tags of which some memory is evicted, of those that work under `tags` touches.
    fn evicted(&self, tags: &Tags) -> Vec<String>;
}

/// What keeps a use from beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// Something of it is being closed: it waits.
    Closing,
    /// Nothing but a parked use that is about to go on, and comes first.
    Parked,
    /// Some memory of these of its tags is evicted, and nobody is closing any.
    Evicted(Vec<String>),
}

/// What a parked use that votes says about a move, once it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ballot {
    /// The closing still waits for uses, or for the work of what is parked.
    NotYet,
    /// All of that has ended: with yes its memory moves.
    Asked,
    /// No closing touches the use any more, and nothing is to be moved.
    Over,
}

/// A use that has begun.
#[derive(Clone, Debug)]
struct Use {
    tags: Tags,
    /// Threads inside it.
    threads: usize,
    /// Of these, threads that wait at a safe point.
    arrived: usize,
    /// Its memory stays where it is until it has voted: it may still go on.
    votes: bool,
    /// It was parked and its memory is back: it runs, though none of its threads may be awake yet.
    released: bool,
    /// It may not be parked again before.
    runs_until: Option<Instant>,
}

/// What is being closed.
#[derive(Clone, Debug)]
struct Closed {
    tags: Tags,
    /// It asks those that vote.
    asks: bool,
}

impl Use {
    fn all_arrived(&self) -> bool {
        self.arrived >= self.threads
    }

    fn is_parked(&self) -> bool {
        self.all_arrived() && !self.released
    }

    fn go_on(&mut self, runs_until: Instant) {
        self.arrived = self.arrived.saturating_sub(1);
        if self.arrived == 0 {
            (self.votes, self.released) = (false, false);
        }
        self.runs_until = self.runs_until.max(Some(runs_until));
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct GateState {
    last: u64,
    begun: u64,
    last_uses: LastUses,
    uses: BTreeMap<UseId, Use>,
    closings: BTreeMap<ClosingId, Closed>,
}

impl GateState {
    /// What keeps a use of these tags from beginning now.
    pub(super) fn obstacle(&self, tags: &Tags, memory: &dyn Evicted) -> Option<Obstacle> {
        if self.is_closing(tags) {
            return Some(Obstacle::Closing);
        }
        let evicted = memory.evicted(tags);
        (!evicted.is_empty()).then_some(Obstacle::Evicted(evicted))
    }

    fn is_closing(&self, tags: &Tags) -> bool {
        self.closings.values().any(|closing| tags.uses_any_of(&closing.tags))
    }

    /// Whether a use that is parked could go on, and its threads are about to.
    fn is_one_about_to_go_on(&self, memory: &dyn Evicted) -> bool {
        let mut parked = self.uses.values().filter(|parked| parked.is_parked());
        parked.any(|parked| self.obstacle(&parked.tags, memory).is_none())
    }

    /// Begins a use, where nothing keeps it from that; with `parked_first` after the parked uses that can go on.
    pub(super) fn begin(
        &mut self,
        tags: &Tags,
        memory: &dyn Evicted,
        parked_first: bool,
    ) -> Result<UseId, Obstacle> {
        if let Some(obstacle) = self.obstacle(tags, memory) {
            return Err(obstacle);
        }
        if parked_first && self.is_one_about_to_go_on(memory) {
            return Err(Obstacle::Parked);
        }
        self.last += 1;
        self.begun += 1;
        let id = UseId(self.last);
        self.last_uses.note(tags, self.last);
        self.uses.insert(
            id,
            Use {
                tags: tags.clone(),
                threads: 1,
                arrived: 0,
                votes: false,
                released: false,
                runs_until: None,
            },
        );
        Ok(id)
    }

    /// One thread more is inside a use. False where it is parked: the thread is not inside. `None`: there is no such use.
    pub(super) fn join(&mut self, id: UseId) -> Option<bool> {
        let joined = self.uses.get_mut(&id)?;
        if joined.is_parked() {
            return Some(false);
        }
        joined.threads += 1;
        Some(true)
    }

    /// One thread less is inside a use, which goes on with the others.
    pub(super) fn leave(&mut self, id: UseId) -> bool {
        let Some(left) = self.uses.get_mut(&id) else { return false };
        left.threads = left.threads.saturating_sub(1).max(1);
        true
    }

    /// Whether a closing touches a use that has run for long enough.
    pub(super) fn wants(&self, id: UseId, now: Instant) -> bool {
        self.uses.get(&id).is_some_and(|wanted| {
            self.is_closing(&wanted.tags) && wanted.runs_until.is_none_or(|until| now >= until)
        })
    }

    /// A thread of a use has come to a safe point; whether it has to wait there: a closing wants the use.
    pub(super) fn arrive(&mut self, id: UseId, now: Instant) -> bool {
        if !self.wants(id, now) {
            return false;
        }
        if let Some(here) = self.uses.get_mut(&id) {
            here.arrived += 1;
        }
        true
    }

    /// As [`GateState::arrive`], and nothing of the use moves before it has voted.
    pub(super) fn arrive_to_vote(&mut self, id: UseId, now: Instant) -> bool {
        let arrives = self.arrive(id, now);
        if arrives && let Some(here) = self.uses.get_mut(&id) {
            here.votes = true;
        }
        arrives
    }

    /// Whether a use that votes is asked.
    pub(super) fn ballot(&self, id: UseId) -> Ballot {
        let Some(parked) = self.uses.get(&id) else { return Ballot::Over };
        let closings = self.closings.values().filter(|closing| parked.tags.uses_any_of(&closing.tags));
        closings.fold(Ballot::Over, |found, closing| match (found, closing.asks) {
            (Ballot::Asked, _) | (_, true) => Ballot::Asked,
            _ => Ballot::NotYet,
        })
    }

    /// A use that is asked lets its memory move; whether anybody who moves it has heard that.
    pub(super) fn agree(&mut self, id: UseId) -> bool {
        let asked = self.ballot(id) == Ballot::Asked;
        match self.uses.get_mut(&id) {
            Some(parked) if asked && parked.votes => {
                parked.votes = false;
                true
            }
            _ => false,
        }
    }

    /// A thread of a use that votes goes on at once; the use is not parked before `until`. Whether it can: it has not agreed.
    pub(super) fn refuse(&mut self, id: UseId, until: Instant) -> bool {
        let votes = self.uses.get(&id).is_some_and(|parked| parked.votes);
        if votes {
            self.go_on(id, until);
        }
        votes
    }

    /// Whether a thread that waits at a safe point can go on; so it can where its use has ended.
    pub(super) fn can_go_on(&self, id: UseId, memory: &dyn Evicted) -> bool {
        self.uses
            .get(&id)
            .is_none_or(|parked| parked.released || self.obstacle(&parked.tags, memory).is_none())
    }

    /// A thread goes on from a safe point. Its use runs until then at least; of one that was parked a new use of its memory begins.
    pub(super) fn go_on(&mut self, id: UseId, runs_until: Instant) {
        if let Some(parked) = self.uses.get_mut(&id) {
            if parked.all_arrived() {
                self.last += 1;
                self.last_uses.note(&parked.tags, self.last);
            }
            parked.go_on(runs_until);
        }
    }

    /// A closing could not park these uses safely: they run, and are not parked before.
    pub(super) fn hold_off(&mut self, id: ClosingId, until: Instant) {
        let Some(closing) = self.closings.get(&id) else { return };
        for parked in self.uses.values_mut().filter(|parked| parked.tags.uses_any_of(&closing.tags)) {
            parked.runs_until = parked.runs_until.max(Some(until));
        }
    }

    /// Whether there was such a use.
    pub(super) fn end_use(&mut self, id: UseId) -> bool {
        self.uses.remove(&id).is_some()
    }

    /// Before a closing: parked uses that have all of their memory back go on, whoever closes. Those that still have to vote are asked anew.
    pub(super) fn release(&mut self, memory: &dyn Evicted) {
        let is_back =
            |used: &Use| used.is_parked() && !used.votes && self.obstacle(&used.tags, memory).is_none();
        let back: Vec<UseId> =
            self.uses.iter().filter(|(_, used)| is_back(used)).map(|(id, _)| *id).collect();
        for id in back {
            if let Some(used) = self.uses.get_mut(&id) {
                used.released = true;
            }
        }
    }

    pub(super) fn close(&mut self, tags: Tags) -> ClosingId {
        self.last += 1;
        let id = ClosingId(self.last);
        self.closings.insert(id, Closed { tags, asks: false });
        id
    }

    /// How many uses run of what a closing closes: all began before it, and none is parked.
    pub(super) fn running(&self, id: ClosingId) -> usize {
        let Some(closing) = self.closings.get(&id) else { return 0 };
        self.uses.values().filter(|used| !used.is_parked() && used.tags.uses_any_of(&closing.tags)).count()
    }

    /// How many uses of what a closing closes are parked.
    pub(super) fn parked_for(&self, id: ClosingId) -> usize {
        let Some(closing) = self.closings.get(&id) else { return 0 };
        self.uses.values().filter(|used| used.is_parked() && used.tags.uses_any_of(&closing.tags)).count()
    }

    /// A closing asks those parked uses that vote; answers how many have not agreed yet.
    pub(super) fn open_votes(&mut self, id: ClosingId) -> usize {
        let Some(closing) = self.closings.get_mut(&id) else { return 0 };
        closing.asks = true;
        let asked = |used: &&Use| used.votes && used.is_parked() && used.tags.uses_any_of(&closing.tags);
        self.uses.values().filter(asked).count()
    }

    /// A closing asks no more: who agrees from now on is not heard.
    pub(super) fn stop_asking(&mut self, id: ClosingId) {
        if let Some(closing) = self.closings.get_mut(&id) {
            closing.asks = false;
        }
    }

    /// The closing is over. What it evicted is evicted by then.
    pub(super) fn end(&mut self, id: ClosingId) {
        self.closings.remove(&id);
    }

    /// Whether no use of a tag runs, and nothing of it leaves or is about to. A use that is parked does not run; while what it is parked
    /// for is under way, its memory is not idle.
    pub(super) fn is_idle(&self, tag: &str) -> bool {
        let mut uses = self.uses.values().filter(|used| used.tags.use_of(tag));
        let is_used = uses.any(|used| !used.is_parked() || self.is_closing(&used.tags));
        !is_used && !self.closings.values().any(|closing| closing.tags.contains(tag))
    }

    /// Whether no use runs, and nothing leaves or is about to.
    pub(super) fn is_all_idle(&self) -> bool {
        self.closings.is_empty() && self.uses.values().all(Use::is_parked)
    }

    /// The number of the last use of a tag.
    pub(super) fn last_use_of(&self, tag: &str) -> u64 {
        self.last_uses.of(tag)
    }

    pub(super) fn uses(&self) -> usize {
        self.uses.len()
    }

    /// How many uses have begun so far.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// Whether any use runs.
    pub(super) fn is_any_running(&self) -> bool {
        self.uses.values().any(|used| !used.is_parked())
    }

    pub(super) fn parked(&self) -> usize {
        self.uses.values().filter(|used| used.is_parked()).count()
    }

    pub(super) fn closings(&self) -> impl Iterator<Item = &Tags> {
        self.closings.values().map(|closing| &closing.tags)
    }
}

#[cfg(test)]
mod tests;
