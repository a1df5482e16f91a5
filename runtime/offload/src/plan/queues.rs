//! Copy queues out of a GPU and into it in virtual time, sharing a link.

use super::course::Rates;

/// Enqueued copies of both directions and their progress. A copy's size is its duration alone on the link.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queues {
    now: f64,
    out: Queue,
    into: Queue,
}

/// Copies of one direction, in order.
#[derive(Clone, Debug, Default)]
struct Queue {
    copies: Vec<f64>,
    done: usize,
    /// Remaining part of the first incomplete copy.
    left: f64,
}

impl Queues {
    pub(crate) fn clear(&mut self) {
        self.now = 0.0;
        self.out.clear();
        self.into.clear();
    }

    pub(crate) fn push_out(&mut self, copy: f64) {
        self.out.push(copy);
    }

    pub(crate) fn push_into(&mut self, copy: f64) {
        self.into.push(copy);
    }

    /// Advances time to `until`.
    pub(crate) fn advance(&mut self, until: f64, rates: Rates) {
        while self.now < until {
            self.step(until, rates);
        }
    }

    /// Advances time until the first `out` copies out and `into` copies in have completed, and returns that time.
    pub(crate) fn wait(&mut self, out: usize, into: usize, rates: Rates) -> f64 {
        let (out, into) = (out.min(self.out.copies.len()), into.min(self.into.copies.len()));
        while self.out.done < out || self.into.done < into {
            self.step(f64::INFINITY, rates);
        }
        self.now
    }

    /// Advances to the end of the next copy, or to `until`.
    fn step(&mut self, until: f64, rates: Rates) {
        let (out, into) = (self.out.is_busy(), self.into.is_busy());
        if !out && !into {
            self.now = until;
            return;
        }
        let out_rate = if into { rates.out_at_once } else { 1.0 };
        let into_rate = if out { rates.into_at_once } else { 1.0 };
        let ends = |queue: &Queue, rate: f64| if queue.is_busy() { queue.left / rate } else { f64::INFINITY };
        let (out_ends, into_ends) = (ends(&self.out, out_rate), ends(&self.into, into_rate));
        let next = out_ends.min(into_ends);
        if self.now + next > until {
            let passed = until - self.now;
            self.out.left -= passed * out_rate;
            self.into.left -= passed * into_rate;
            self.now = until;
            return;
        }
        self.now += next;
        self.out.left -= next * out_rate;
        self.into.left -= next * into_rate;
        if out_ends <= next {
            self.out.end();
        }
        if into_ends <= next {
            self.into.end();
        }
    }
}

impl Queue {
    fn clear(&mut self) {
        self.copies.clear();
        (self.done, self.left) = (0, 0.0);
    }

    fn is_busy(&self) -> bool {
        self.done < self.copies.len()
    }

    fn push(&mut self, copy: f64) {
        if !self.is_busy() {
            self.left = copy;
        }
        self.copies.push(copy);
    }

    /// Completes the first copy.
    fn end(&mut self) {
        self.done += 1;
        self.left = self.copies.get(self.done).copied().unwrap_or(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Rates = Rates { out_at_once: 1.0, into_at_once: 1.0 };
    const HALF: Rates = Rates { out_at_once: 0.5, into_at_once: 0.5 };

    #[test]
    fn copies_of_one_way_follow_each_other() {
        let mut queues = Queues::default();
        queues.push_out(10.0);
        queues.push_out(5.0);
        queues.advance(4.0, ALONE);
        assert_eq!(queues.wait(1, 0, ALONE), 10.0);
        assert_eq!(queues.wait(2, 0, ALONE), 15.0);
        queues.advance(20.0, ALONE);
        queues.push_out(1.0);
        assert_eq!(queues.wait(3, 0, ALONE), 21.0);
    }

    #[test]
    fn both_ways_at_once_slow_each_other_down() {
        let mut queues = Queues::default();
        queues.push_out(10.0);
        queues.push_into(5.0);
        assert_eq!(queues.wait(0, 1, HALF), 10.0);
        assert_eq!(queues.wait(1, 1, HALF), 15.0);
    }
}
