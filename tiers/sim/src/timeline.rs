//! Streams as queues of work, and the completion time of each piece.
//!
//! Pure: independent of memory and clocks. Work runs in the order of its lane. It begins once everything it waits for has passed, takes its
//! cost, and is then given to [`Effects`], which moves the bytes. A [`Point`] is the end of one piece of work: an event is a list of
//! points.
//!
//! Lanes may share a hardware *queue*: their work begins in the order of issue, so that waiting work delays later work on other lanes of
//! the queue.
//!
//! Invariant: between calls, every lane that can proceed at `now` has done so (except for waits for a value, which the host may have
//! written since: [`Timeline::settle`] checks again).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use super::flow::{FlowNet, Load};

/// End of the `n`-th piece of work of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) lane: u64,
    pub(super) n: u64,
}

/// Cost of a piece of work, in nanoseconds and bytes.
#[derive(Debug)]
pub(super) enum Cost<V> {
    None,
    Delay(u64),
    /// A delay, then bytes over links.
    Flow(u64, Vec<Load>),
    /// Waiting until a value compares true.
    Value(V),
}

/// Callbacks of the timeline into the simulated world.
pub(super) trait Effects {
    type Work: std::fmt::Debug;
    type Value: std::fmt::Debug;
    /// Runs a piece of work that is done at `now`.
    fn run(&mut self, work: Self::Work, now: u64);
    /// Returns whether a value compares true.
    fn holds(&self, value: &Self::Value) -> bool;
}

#[derive(Debug)]
struct Item<E: Effects> {
    after: Vec<Point>,
    cost: Cost<E::Value>,
    work: E::Work,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The head has not begun.
    Idle,
    /// The head is in its delay.
    Delayed,
    /// This number of flows of the head is in flight.
    Flowing(usize),
    /// The head waits for a value.
    Watching,
}

#[derive(Debug)]
struct Lane<E: Effects> {
    queue: VecDeque<Item<E>>,
    issued: u64,
    done: u64,
    phase: Phase,
    /// Lanes that wait for this one, by the number of pieces that must be done.
    waiters: BTreeMap<u64, Vec<u64>>,
    /// Queued work that may have to wait for other lanes or for a value, in order.
    waits: VecDeque<u64>,
    /// Hardware queue that the lane shares, if any.
    shared: Option<u64>,
    /// Whether the lane is removed once it is empty.
    closing: bool,
}

#[derive(Debug)]
pub(super) struct Timeline<E: Effects> {
    now: u64,
    lanes: HashMap<u64, Lane<E>>,
    /// Ends of delays: time, a number that keeps equal times in order, lane.
    due: BinaryHeap<Reverse<(u64, u64, u64)>>,
    sequence: u64,
    net: FlowNet,
    watching: Vec<u64>,
    ready: Vec<u64>,
    /// Work of each hardware queue that has not begun, in order of issue.
    queues: HashMap<u64, VecDeque<Point>>,
    /// Largest number of pieces queued behind a wait of their lane.
    deepest: u64,
    /// Number of completed pieces of work, except those that complete as soon as they begin ([`Cost::None`]).
    completed: u64,
}

impl<E: Effects> Timeline<E> {
    pub(super) fn new(pipes: Vec<f64>) -> Self {
        Timeline {
            now: 0,
            lanes: HashMap::new(),
            due: BinaryHeap::new(),
            sequence: 0,
            net: FlowNet::new(pipes),
            watching: Vec::new(),
            ready: Vec::new(),
            queues: HashMap::new(),
            deepest: 0,
            completed: 0,
        }
    }

    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn open(&mut self, lane: u64) {
        self.add(lane, None);
    }

    /// Opens a lane that shares a hardware queue.
    pub(super) fn open_on(&mut self, lane: u64, queue: u64) {
        self.add(lane, Some(queue));
    }

    fn add(&mut self, lane: u64, shared: Option<u64>) {
        let new = Lane {
            queue: VecDeque::new(),
            issued: 0,
            done: 0,
            phase: Phase::Idle,
            waiters: BTreeMap::new(),
            waits: VecDeque::new(),
            shared,
            closing: false,
        };
        self.lanes.insert(lane, new);
    }

    /// Removes a lane once its work is done.
    pub(super) fn close(&mut self, lane: u64) {
        if let Some(open) = self.lanes.get_mut(&lane) {
            open.closing = true;
            if open.queue.is_empty() {
                self.lanes.remove(&lane);
            }
        }
    }

    /// Returns whether a pipe is in use, or about to be by work that has begun.
    pub(super) fn is_in(&self, pipe: usize) -> bool {
        let begins = |lane: &Lane<E>| match lane.queue.front() {
            Some(Item { cost: Cost::Flow(_, loads), .. }) => {
                lane.phase == Phase::Delayed && loads.iter().any(|load| load.is_in(pipe))
            }
            _ => false,
        };
        self.net.is_in(pipe) || self.lanes.values().any(begins)
    }

    /// Returns the end of all work of a lane so far.
    pub(super) fn last(&self, lane: u64) -> Point {
        Point { lane, n: self.lanes.get(&lane).map_or(0, |lane| lane.issued) }
    }

    pub(super) fn passed(&self, point: Point) -> bool {
        self.lanes.get(&point.lane).is_none_or(|lane| lane.done >= point.n)
    }

    /// Returns the number of unfinished pieces of work of a lane.
    pub(super) fn queued(&self, lane: u64) -> usize {
        self.lanes.get(&lane).map_or(0, |lane| lane.queue.len())
    }

    /// Returns the largest number of pieces queued on one lane behind an unfinished wait.
    pub(super) fn deepest(&self) -> u64 {
        self.deepest
    }

    /// Resets [`Timeline::deepest`] to zero.
    pub(super) fn forget_deepest(&mut self) {
        self.deepest = 0;
    }

    /// Enqueues work; [`Timeline::settle`] begins it.
    pub(super) fn issue(
        &mut self,
        lane: u64,
        after: Vec<Point>,
        cost: Cost<E::Value>,
        work: E::Work,
    ) -> Point {
        let Some(open) = self.lanes.get_mut(&lane) else { return Point { lane, n: 0 } };
        open.issued += 1;
        if !after.is_empty() || matches!(cost, Cost::Value(_)) {
            open.waits.push_back(open.issued);
        }
        open.queue.push_back(Item { after, cost, work });
        if open.queue.len() == 1 {
            self.ready.push(lane);
        }
        let point = Point { lane, n: open.issued };
        if let Some(queue) = open.shared {
            self.queues.entry(queue).or_default().push_back(point);
        }
        self.measure(lane);
        point
    }

    /// Measures the work of a lane behind its first unfinished wait.
    fn measure(&mut self, lane: u64) {
        while let Some(open) = self.lanes.get(&lane)
            && let Some(first) = open.waits.front().copied()
        {
            // The piece is done, or everything it waited for has passed.
            let item = first.checked_sub(open.done + 1).and_then(|at| open.queue.get(at as usize));
            let over = item.is_none_or(|item| {
                !matches!(item.cost, Cost::Value(_)) && item.after.iter().all(|point| self.passed(*point))
            });
            if !over {
                self.deepest = self.deepest.max(open.issued - first);
                return;
            }
            if let Some(open) = self.lanes.get_mut(&lane) {
                open.waits.pop_front();
            }
        }
    }

    /// Runs everything that is possible without advancing time.
    pub(super) fn settle(&mut self, effects: &mut E) {
        loop {
            while let Some(lane) = self.ready.pop() {
                self.begin(lane, effects);
            }
            for lane in std::mem::take(&mut self.watching) {
                let holds = match self.lanes.get(&lane).and_then(|lane| lane.queue.front()) {
                    Some(Item { cost: Cost::Value(value), .. }) => effects.holds(value),
                    _ => true,
                };
                if holds {
                    self.finish(lane, effects);
                } else {
                    self.watching.push(lane);
                }
            }
            if self.ready.is_empty() {
                return;
            }
        }
    }

    /// Returns the time of the next change that needs no caller.
    pub(super) fn next(&self) -> Option<u64> {
        let due = self.due.peek().map(|Reverse((time, ..))| *time);
        [due, self.net.next()].into_iter().flatten().min()
    }

    /// Advances time to `to`, running due work on the way.
    pub(super) fn advance(&mut self, to: u64, effects: &mut E) {
        self.settle(effects);
        while let Some(next) = self.next().filter(|next| *next <= to) {
            self.happen(next, effects);
        }
        self.now = self.now.max(to);
    }

    /// Advances time to the next completion; returns false if no work will ever complete.
    pub(super) fn step(&mut self, effects: &mut E) -> bool {
        self.settle(effects);
        let before = self.completed;
        while self.completed == before {
            match self.next() {
                Some(next) => self.happen(next, effects),
                None => return false,
            }
        }
        true
    }

    fn happen(&mut self, at: u64, effects: &mut E) {
        self.now = self.now.max(at);
        for lane in self.net.end(self.now) {
            match self.lanes.get_mut(&lane).map(|lane| &mut lane.phase) {
                Some(Phase::Flowing(left)) if *left > 1 => *left -= 1,
                _ => self.finish(lane, effects),
            }
        }
        while let Some(Reverse((time, _, lane))) = self.due.peek().copied()
            && time <= self.now
        {
            self.due.pop();
            self.delay_over(lane, effects);
        }
        self.settle(effects);
    }

    fn delay_over(&mut self, lane: u64, effects: &mut E) {
        let Some(open) = self.lanes.get_mut(&lane) else { return };
        match open.queue.front() {
            Some(Item { cost: Cost::Flow(_, loads), .. }) if !loads.is_empty() => {
                open.phase = Phase::Flowing(loads.len());
                self.net.begin(self.now, lane, loads);
            }
            _ => self.finish(lane, effects),
        }
    }

    /// Begins the heads of a lane for as long as they take no time.
    fn begin(&mut self, lane: u64, effects: &mut E) {
        loop {
            let Some(open) = self.lanes.get(&lane) else { return };
            let Some(item) = open.queue.front().filter(|_| open.phase == Phase::Idle) else { return };
            let own = Point { lane, n: open.done + 1 };
            let queue = open.shared.and_then(|queue| self.queues.get(&queue));
            if queue.is_some_and(|queue| queue.front() != Some(&own)) {
                // The lane is checked again once its work is first in the queue.
                return;
            }
            if let Some(&point) = item.after.iter().find(|point| !self.passed(**point)) {
                if let Some(other) = self.lanes.get_mut(&point.lane) {
                    other.waiters.entry(point.n).or_default().push(lane);
                }
                return;
            }
            let (phase, delay) = match &item.cost {
                Cost::None => {
                    self.finish_quietly(lane, effects);
                    continue;
                }
                Cost::Value(_) => {
                    self.watching.push(lane);
                    (Phase::Watching, None)
                }
                Cost::Delay(time) | Cost::Flow(time, _) => (Phase::Delayed, Some(*time)),
            };
            if let Some(delay) = delay {
                self.pass_on(lane);
                self.sequence += 1;
                self.due.push(Reverse((self.now.saturating_add(delay), self.sequence, lane)));
            }
            if let Some(open) = self.lanes.get_mut(&lane) {
                open.phase = phase;
            }
            return;
        }
    }

    /// Completes the head of a lane, whose time has come.
    fn finish(&mut self, lane: u64, effects: &mut E) {
        self.completed += 1;
        self.finish_quietly(lane, effects);
        self.ready.push(lane);
    }

    /// Lets the shared queue proceed past the head of a lane.
    fn pass_on(&mut self, lane: u64) {
        let Some(open) = self.lanes.get(&lane) else { return };
        let own = Point { lane, n: open.done + 1 };
        let Some(queue) = open.shared.and_then(|queue| self.queues.get_mut(&queue)) else { return };
        if queue.front() == Some(&own) {
            queue.pop_front();
            self.ready.extend(queue.front().map(|next| next.lane));
        }
    }

    fn finish_quietly(&mut self, lane: u64, effects: &mut E) {
        self.pass_on(lane);
        let Some(open) = self.lanes.get_mut(&lane) else { return };
        let Some(item) = open.queue.pop_front() else { return };
        open.done += 1;
        open.phase = Phase::Idle;
        while let Some(first) = open.waiters.first_entry().filter(|first| *first.key() <= open.done) {
            self.ready.extend(first.remove());
        }
        if open.closing && open.queue.is_empty() {
            self.lanes.remove(&lane);
        }
        effects.run(item.work, self.now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Log {
        done: Vec<(u32, u64)>,
        open: bool,
    }

    impl Effects for Log {
        type Work = u32;
        type Value = ();
        fn run(&mut self, work: u32, now: u64) {
            self.done.push((work, now));
        }
        fn holds(&self, _: &()) -> bool {
            self.open
        }
    }

    #[test]
    fn work_waits_for_its_lane_and_its_points() {
        let (mut time, mut log) = (Timeline::<Log>::new(vec![1.0]), Log::default());
        time.open(1);
        time.open(2);
        let first = time.issue(1, vec![], Cost::Delay(10), 1);
        time.issue(2, vec![first], Cost::Flow(5, vec![]), 2);
        let load = Load { route: [(0, 1.0)].into(), bytes: 100, cap: f64::INFINITY };
        let last = time.issue(1, vec![], Cost::Flow(2, vec![load.clone(), load]), 3);
        time.advance(9, &mut log);
        assert_eq!((log.done.as_slice(), time.passed(first)), (&[][..], false));
        assert!(time.step(&mut log));
        assert_eq!((log.done.as_slice(), time.passed(first)), (&[(1, 10)][..], true));
        assert!(time.step(&mut log) && time.step(&mut log) && !time.step(&mut log));
        assert_eq!(log.done, [(1, 10), (2, 15), (3, 212)]);
        assert!(time.passed(last));
        time.close(1);
        assert_eq!(time.lanes.len(), 1);
    }

    #[test]
    fn a_value_is_waited_for_without_time() {
        let (mut time, mut log) = (Timeline::<Log>::new(vec![]), Log::default());
        time.open(1);
        time.issue(1, vec![], Cost::Value(()), 1);
        time.issue(1, vec![], Cost::None, 2);
        assert!(!time.step(&mut log));
        log.open = true;
        time.settle(&mut log);
        assert_eq!(log.done, [(1, 0), (2, 0)]);
    }
}
