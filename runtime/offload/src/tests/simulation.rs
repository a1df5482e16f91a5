//! A pass in virtual time under a clock, with memory counted copy by copy: it knows nothing of how plans are made.

use std::sync::Arc;

use fastrand::Rng;

use crate::{Clock, ItemId, Links, Plan, Position, Step, Tape, Verdict};

/// One item of the pass.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// On the GPU.
    held: bool,
    reloaded: bool,
    arrived: bool,
    copied: bool,
}

#[derive(Debug)]
struct Pass<'a> {
    tape: &'a Tape,
    links: &'a Links,
    rng: Option<Rng>,
    now: f64,
    out: Vec<(ItemId, f64)>,
    into: Vec<(ItemId, f64)>,
    items: Vec<State>,
    verdicts: Vec<Verdict>,
    cell: usize,
    bound: Vec<i64>,
}

/// How long a pass like `plan`'s tape takes, in microseconds; with `jitter` times and rates are up to a half off. What
/// is held in each cell is compared with what the plan said.
pub(super) fn run(plan: &Arc<Plan>, links: &Links, jitter: Option<u64>) -> f64 {
    let tape = Arc::clone(plan.tape());
    let mut clock = Clock::new(Arc::clone(plan));
    let mut pass = Pass {
        tape: &tape,
        links,
        rng: jitter.map(Rng::with_seed),
        now: 0.0,
        out: Vec::new(),
        into: Vec::new(),
        items: vec![State::default(); tape.items().len()],
        verdicts: plan.verdicts().to_vec(),
        cell: 0,
        bound: plan.held().iter().map(|held| signed(held.get())).collect(),
    };
    for (at, step) in tape.steps().iter().enumerate() {
        pass.cell = at;
        let orders = match *step {
            Step::Pack(item) => clock.packed(&tape.items()[item.index()].pack()).1,
            Step::Unpack(item) => clock.unpacked(item).unwrap(),
        };
        pass.step(at, *step, orders.settle, orders.reload, orders.replay);
    }
    assert_eq!(clock.diverged(), None);
    pass.now
}

impl Pass<'_> {
    fn step(
        &mut self,
        at: usize,
        step: Step,
        settle: &[ItemId],
        reload: &[ItemId],
        replay: Option<crate::ScopeId>,
    ) {
        for &item in settle {
            self.pass_until(|pass| pass.items[item.index()].copied);
        }
        for &item in reload {
            let state = &mut self.items[item.index()];
            assert!(state.copied && !state.reloaded, "{item} at {at}");
            (state.held, state.reloaded) = (true, true);
            let copy = self.length(item, self.links.into.0);
            self.into.push((item, copy));
        }
        if let Some(scope) = replay {
            for index in 0..self.items.len() {
                let item = &self.tape.items()[index];
                if item.pack().scope == Some(scope)
                    && item.packed() < Position(at)
                    && !item.unpacks().is_empty()
                {
                    match self.verdicts[index] {
                        Verdict::Recompute => {
                            self.items[index].held = true;
                            self.now_after(item.recompute().unwrap().time().as_secs_f64() * 1e6);
                        }
                        Verdict::Offload => self.pass_until(|pass| pass.items[index].arrived),
                        Verdict::Keep => {}
                    }
                }
            }
        }
        match step {
            Step::Pack(item) => {
                self.items[item.index()].held = true;
                if self.verdicts[item.index()] == Verdict::Offload {
                    let copy = self.length(item, self.links.out.0);
                    self.out.push((item, copy));
                }
            }
            Step::Unpack(item) => {
                if self.verdicts[item.index()] == Verdict::Offload {
                    self.pass_until(|pass| pass.items[item.index()].arrived);
                }
                assert!(self.items[item.index()].held, "{item} is unpacked at {at} and not there");
            }
        }
        self.count();
        let begins = |at| self.tape.time_at(Position(at)).as_secs_f64() * 1e6;
        self.now_after(begins(at + 1) - begins(at));
        self.free(at + 1);
    }

    /// How long a copy takes alone.
    #[allow(clippy::cast_precision_loss)]
    fn length(&mut self, item: ItemId, rate: f64) -> f64 {
        let bytes = self.tape.items()[item.index()].pack().link_bytes.get() as f64;
        self.off(self.links.copy.as_secs_f64() * 1e6 + bytes / rate / 1e3)
    }

    fn off(&mut self, time: f64) -> f64 {
        self.rng.as_mut().map_or(time, |rng| time * (0.5 + rng.f64()))
    }

    fn now_after(&mut self, compute: f64) {
        let until = self.now + self.off(compute);
        while self.now < until {
            self.advance(until - self.now);
        }
    }

    fn pass_until(&mut self, done: impl Fn(&Self) -> bool) {
        while !done(self) {
            assert!(!self.out.is_empty() || !self.into.is_empty(), "waits for what never ends");
            self.advance(f64::INFINITY);
        }
    }

    /// To the next end of a copy, or by `most`.
    fn advance(&mut self, most: f64) {
        let both = !self.out.is_empty() && !self.into.is_empty();
        let out_rate = if both { self.links.out_at_once.0 / self.links.out.0 } else { 1.0 };
        let into_rate = if both { self.links.into_at_once.0 / self.links.into.0 } else { 1.0 };
        let out_left = self.out.first().map_or(f64::INFINITY, |(_, left)| left / out_rate);
        let into_left = self.into.first().map_or(f64::INFINITY, |(_, left)| left / into_rate);
        let passed = most.min(out_left).min(into_left);
        self.now += passed;
        if let Some((item, left)) = self.out.first_mut() {
            *left -= passed * out_rate;
            if out_left <= passed {
                self.items[item.index()].copied = true;
                self.out.remove(0);
                self.free(self.cell);
            }
        }
        if let Some((item, left)) = self.into.first_mut() {
            *left -= passed * into_rate;
            if into_left <= passed {
                self.items[item.index()].arrived = true;
                self.into.remove(0);
            }
        }
    }

    /// What nobody holds in `cell` any more goes.
    fn free(&mut self, cell: usize) {
        for (index, item) in self.tape.items().iter().enumerate() {
            let (state, verdict) = (&mut self.items[index], self.verdicts[index]);
            let last = item.unpacks().last();
            let used = last.is_none_or(|last| last.0 < cell);
            state.held &= match verdict {
                _ if item.released().0 > cell => true,
                Verdict::Keep => item.dropped().0 > cell || !used,
                Verdict::Offload if !state.reloaded => !state.copied,
                Verdict::Offload => !used,
                Verdict::Recompute => {
                    let scope = item.pack().scope;
                    let mates = self.tape.items().iter().filter(|other| other.pack().scope == scope);
                    let replay = mates.filter_map(|other| other.unpacks().first()).min();
                    !used && replay.is_some_and(|at| at.0 <= cell)
                }
            };
        }
    }

    /// Memory at this moment, against what the plan said of it.
    fn count(&mut self) {
        let rest = signed(self.tape.rest_at(Position(self.cell)).get());
        let items = self.tape.items().iter().zip(&self.items).filter(|(_, state)| state.held);
        let held = rest + items.map(|(item, _)| signed(item.pack().bytes.get())).sum::<i64>();
        assert!(
            held <= self.bound[self.cell],
            "{held} at {}, of which the plan said {}",
            self.cell,
            self.bound[self.cell]
        );
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap()
}
