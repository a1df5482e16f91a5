//! Optimal verdicts by exhaustive enumeration of every verdict of every item and every position of every reload.
//!
//! Copies out are waited for only where memory runs out, which no earlier wait improves on; so verdicts and reloads determine everything.
//! For tapes of a few items.

use super::course::{Course, NONE, signed};
use super::curve::Curve;
use super::order::{Arms, together};
use super::schedule::Schedule;
use super::search::Search;
use super::timing::Clockwork;
use super::{Preset, Request, Verdict};
use crate::Tape;

/// State of the exhaustive enumeration.
#[derive(Debug)]
struct Everything<'c> {
    course: &'c Course,
    budget: i64,
    verdicts: Vec<Verdict>,
    replayed: Vec<bool>,
    curve: Curve,
    schedule: Schedule,
    clockwork: Clockwork,
    /// Offloaded items in the order in which they are needed.
    needed: Vec<usize>,
    best: Option<f64>,
}

fn arms(request: &Request) -> Arms {
    match request.preset {
        Preset::Hybrid => Arms::Leaves,
        Preset::Fit => Arms::Scopes,
        Preset::Memory => Arms::Stored,
    }
}

/// Returns the pass time found by a search limited to `tries` trials, in microseconds; `None` if nothing fits.
pub(crate) fn found_with(tape: &Tape, request: &Request, tries: usize) -> Option<f64> {
    let course = Course::new(tape, &request.links);
    let mut search =
        Search::new(&course, signed(request.budget.get()), request.host_room.get(), arms(request));
    search.work = tries * search.work_of_one();
    search.run().map(|best| best.outcome.timing.total)
}

/// Returns the minimum pass time within the request, in microseconds; `None` if nothing fits.
pub(crate) fn least_time(tape: &Tape, request: &Request) -> Option<f64> {
    let arms = arms(request);
    let course = Course::new(tape, &request.links);
    let mut everything = Everything {
        course: &course,
        budget: signed(request.budget.get()),
        verdicts: Vec::new(),
        replayed: Vec::new(),
        curve: Curve::default(),
        schedule: Schedule::default(),
        clockwork: Clockwork::default(),
        needed: Vec::new(),
        best: None,
    };
    let count = u32::try_from(course.items.len()).unwrap();
    for code in 0..3_usize.pow(count) {
        let verdicts: Vec<Verdict> = (0..count)
            .map(|item| match code / 3_usize.pow(item) % 3 {
                0 => Verdict::Keep,
                1 => Verdict::Offload,
                _ => Verdict::Recompute,
            })
            .collect();
        let possible = course.items.iter().zip(&verdicts).all(|(item, verdict)| {
            *verdict != Verdict::Recompute || (item.recompute.is_some() && arms != Arms::Stored)
        });
        let mut moved = verdicts.clone();
        together(&course, arms, &mut moved);
        if possible && moved == verdicts {
            everything.verdicts = verdicts;
            everything.reloads();
        }
    }
    everything.best
}

impl Everything<'_> {
    fn reloads(&mut self) {
        self.course.replayed(&self.verdicts, &mut self.replayed);
        self.curve.fill(self.course, &self.verdicts, &self.replayed);
        if self.curve.peak() > self.budget {
            return;
        }
        let items = &self.course.items;
        let offloaded = (0..items.len()).filter(|item| self.verdicts[*item] == Verdict::Offload);
        self.schedule.out = offloaded.collect();
        let need = |item: &usize| self.course.need(&items[*item], &self.replayed);
        self.needed = self.schedule.out.iter().copied().filter(|item| need(item) != NONE).collect();
        self.needed.sort_by_key(|item| (need(item), items[*item].first));
        self.schedule.into.clone_from(&self.needed);
        self.schedule.reload_at = vec![NONE; items.len()];
        self.schedule.ahead = vec![0; self.course.cells];
        self.place(0, 0);
    }

    /// Tries every feasible step from `from` on for the reload with index `at`.
    fn place(&mut self, at: usize, from: usize) {
        let Some(&index) = self.needed.get(at) else {
            self.schedule.copies_out(self.course, &self.curve, self.budget);
            let run = self.clockwork.run(self.course, &self.verdicts, &self.replayed, &self.schedule);
            self.best = Some(self.best.map_or(run.total, |best| best.min(run.total)));
            return;
        };
        let item = self.course.items[index];
        let need = self.course.need(&item, &self.replayed);
        let earliest = (item.release + 1).min(need).max(from);
        for begin in earliest..=need {
            let mut ahead = begin..need;
            if ahead
                .all(|cell| self.curve.cells()[cell] + self.schedule.ahead[cell] + item.bytes <= self.budget)
            {
                self.schedule.reload_at[index] = begin;
                (begin..need).for_each(|cell| self.schedule.ahead[cell] += item.bytes);
                self.place(at + 1, begin);
                (begin..need).for_each(|cell| self.schedule.ahead[cell] -= item.bytes);
            }
        }
    }
}
