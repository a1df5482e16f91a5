//! Pure state of uses and closings. Which memory is evicted is not part of it: the regions know ([`Evicted`]).
//!
//! ```text
//! use       begin ──► running ──end──►            begin ──closing, evicted──► an obstacle
//!                     │     ▲
//!              arrive ▼     │ resume: no closing, nothing evicted            all its threads have arrived: parked
//!                     parked ──on a vote: no──► running                     with yes, it stays parked
//! closing   close ──► waits for the uses that run ──► asks those that vote ──► moves ──► end        no new use meanwhile
//! ```
//!
//! Invariants: while a closing moves ([`GateState::running`] and [`GateState::open_votes`] are 0), no use that it touches runs. Such a use
//! is parked, and resumes only once no closing touches it and none of its memory is evicted. A use is admitted only if none of its tags is
//! being closed or evicted and no parked use is about to resume: those come first.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use super::last_uses::LastUses;
use super::tags::Tags;

/// Number of a running use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UseId(pub u64);

/// Number of a closing in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClosingId(u64);

/// Source of the evicted tags. Called under the gate's lock: must not take a lock that a caller of the gate may hold.
pub(in super::super) trait Evicted: fmt::Debug + Send + Sync {
    /// Returns the evicted tags among those that work under `tags` touches.
    fn evicted(&self, tags: &Tags) -> Vec<String>;
}

/// Reason that keeps a use from beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// A closing touches its tags; the use waits.
    Closing,
    /// Only a parked use that is about to resume, which comes first.
    Parked,
    /// Memory of these tags is evicted, and no closing touches them.
    Evicted(Vec<String>),
}

/// Voting state of a parked use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ballot {
    /// The closing still waits for uses, or for the work of parked ones.
    NotYet,
    /// All work has ended; a yes lets the memory move.
    Asked,
    /// No closing touches the use any more, and nothing will move.
    Over,
}

/// A use in progress.
#[derive(Clone, Debug)]
struct Use {
    tags: Tags,
    /// Number of threads inside the use.
    threads: usize,
    /// Number of those threads that wait at a safe point.
    arrived: usize,
    /// Whether its memory must not move before it has voted: it may still continue.
    votes: bool,
    /// Whether it was parked and its memory is back: it counts as running, even if its threads are not awake yet.
    released: bool,
    /// Time before which it may not be parked again.
    runs_until: Option<Instant>,
}

/// A closing in progress.
#[derive(Clone, Debug)]
struct Closed {
    tags: Tags,
    /// Whether the closing asks for votes.
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
    /// Returns the obstacle for a use of these tags, if there is one.
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

    /// Returns whether a parked use could resume, so that its threads are about to.
    fn is_one_about_to_go_on(&self, memory: &dyn Evicted) -> bool {
        let mut parked = self.uses.values().filter(|parked| parked.is_parked());
        parked.any(|parked| self.obstacle(&parked.tags, memory).is_none())
    }

    /// Begins a use unless an obstacle exists; with `parked_first`, parked uses that can resume count as one.
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

    /// Adds a thread to a use. Returns `false` if the use is parked: the thread was not added. `None`: no such use.
    pub(super) fn join(&mut self, id: UseId) -> Option<bool> {
        let joined = self.uses.get_mut(&id)?;
        if joined.is_parked() {
            return Some(false);
        }
        joined.threads += 1;
        Some(true)
    }

    /// Removes a thread from a use, which continues with the others.
    pub(super) fn leave(&mut self, id: UseId) -> bool {
        let Some(left) = self.uses.get_mut(&id) else { return false };
        left.threads = left.threads.saturating_sub(1).max(1);
        true
    }

    /// Returns whether a closing touches the use and the use has run for long enough.
    pub(super) fn wants(&self, id: UseId, now: Instant) -> bool {
        self.uses.get(&id).is_some_and(|wanted| {
            self.is_closing(&wanted.tags) && wanted.runs_until.is_none_or(|until| now >= until)
        })
    }

    /// Marks that a thread of a use has reached a safe point. Returns whether it must wait there because a closing wants the use.
    pub(super) fn arrive(&mut self, id: UseId, now: Instant) -> bool {
        if !self.wants(id, now) {
            return false;
        }
        if let Some(here) = self.uses.get_mut(&id) {
            here.arrived += 1;
        }
        true
    }

    /// Arrives like [`GateState::arrive`], but nothing of the use moves before it has voted.
    pub(super) fn arrive_to_vote(&mut self, id: UseId, now: Instant) -> bool {
        let arrives = self.arrive(id, now);
        if arrives && let Some(here) = self.uses.get_mut(&id) {
            here.votes = true;
        }
        arrives
    }

    /// Returns the voting state of a use.
    pub(super) fn ballot(&self, id: UseId) -> Ballot {
        let Some(parked) = self.uses.get(&id) else { return Ballot::Over };
        let closings = self.closings.values().filter(|closing| parked.tags.uses_any_of(&closing.tags));
        closings.fold(Ballot::Over, |found, closing| match (found, closing.asks) {
            (Ballot::Asked, _) | (_, true) => Ballot::Asked,
            _ => Ballot::NotYet,
        })
    }

    /// Records that a use lets its memory move. Returns whether the closing still counts the vote.
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

    /// Lets a thread of a voting use continue at once; the use is not parked before `until`. Returns `false` if it has already agreed.
    pub(super) fn refuse(&mut self, id: UseId, until: Instant) -> bool {
        let votes = self.uses.get(&id).is_some_and(|parked| parked.votes);
        if votes {
            self.go_on(id, until);
        }
        votes
    }

    /// Returns whether a thread at a safe point can continue, which is also the case if its use has ended.
    pub(super) fn can_go_on(&self, id: UseId, memory: &dyn Evicted) -> bool {
        self.uses
            .get(&id)
            .is_none_or(|parked| parked.released || self.obstacle(&parked.tags, memory).is_none())
    }

    /// Lets a thread continue from a safe point. Its use runs at least until `runs_until`; a use that was parked gets a new number.
    pub(super) fn go_on(&mut self, id: UseId, runs_until: Instant) {
        if let Some(parked) = self.uses.get_mut(&id) {
            if parked.all_arrived() {
                self.last += 1;
                self.last_uses.note(&parked.tags, self.last);
            }
            parked.go_on(runs_until);
        }
    }

    /// Resumes the parked uses of a closing and excludes them from parking before `until`, because they could not be parked safely.
    pub(super) fn hold_off(&mut self, id: ClosingId, until: Instant) {
        let Some(closing) = self.closings.get(&id) else { return };
        for parked in self.uses.values_mut().filter(|parked| parked.tags.uses_any_of(&closing.tags)) {
            parked.runs_until = parked.runs_until.max(Some(until));
        }
    }

    /// Ends a use; returns whether it existed.
    pub(super) fn end_use(&mut self, id: UseId) -> bool {
        self.uses.remove(&id).is_some()
    }

    /// Resumes parked uses whose memory is all back, before a closing begins. Uses that still have to vote are asked again.
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

    /// Returns the number of running uses that the closing waits for: all began before it and none is parked.
    pub(super) fn running(&self, id: ClosingId) -> usize {
        let Some(closing) = self.closings.get(&id) else { return 0 };
        self.uses.values().filter(|used| !used.is_parked() && used.tags.uses_any_of(&closing.tags)).count()
    }

    /// Returns the number of parked uses that the closing touches.
    pub(super) fn parked_for(&self, id: ClosingId) -> usize {
        let Some(closing) = self.closings.get(&id) else { return 0 };
        self.uses.values().filter(|used| used.is_parked() && used.tags.uses_any_of(&closing.tags)).count()
    }

    /// Asks the parked uses that vote. Returns the number that have not agreed yet.
    pub(super) fn open_votes(&mut self, id: ClosingId) -> usize {
        let Some(closing) = self.closings.get_mut(&id) else { return 0 };
        closing.asks = true;
        let asked = |used: &&Use| used.votes && used.is_parked() && used.tags.uses_any_of(&closing.tags);
        self.uses.values().filter(asked).count()
    }

    /// Stops asking for votes: a later yes does not count.
    pub(super) fn stop_asking(&mut self, id: ClosingId) {
        if let Some(closing) = self.closings.get_mut(&id) {
            closing.asks = false;
        }
    }

    /// Ends a closing, whose evictions are recorded by then.
    pub(super) fn end(&mut self, id: ClosingId) {
        self.closings.remove(&id);
    }

    /// Returns whether no use of a tag runs and no closing touches it. A parked use does not run, but its memory is not idle while the
    /// closing for which it is parked is in progress.
    pub(super) fn is_idle(&self, tag: &str) -> bool {
        let mut uses = self.uses.values().filter(|used| used.tags.use_of(tag));
        let is_used = uses.any(|used| !used.is_parked() || self.is_closing(&used.tags));
        !is_used && !self.closings.values().any(|closing| closing.tags.contains(tag))
    }

    /// Returns whether no use runs and no closing is in progress.
    pub(super) fn is_all_idle(&self) -> bool {
        self.closings.is_empty() && self.uses.values().all(Use::is_parked)
    }

    /// Returns the number of the last use of a tag.
    pub(super) fn last_use_of(&self, tag: &str) -> u64 {
        self.last_uses.of(tag)
    }

    pub(super) fn uses(&self) -> usize {
        self.uses.len()
    }

    /// Returns the number of uses begun so far.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// Returns whether any use runs.
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
