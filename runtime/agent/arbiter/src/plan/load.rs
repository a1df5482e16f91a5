//! Requests of one run: those of a trace, or drawn from it.

use std::collections::BTreeSet;
use std::time::Duration;

use super::trace::{Row, Trace, TraceError};
use crate::node::Worker;

/// Conversion of a trace into requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Total requests per second at random times, with lengths drawn from the trace; `None`: times of the trace.
    pub rate: Option<f64>,
    /// Duration of the run; `None`: that of the trace.
    pub duration: Option<Duration>,
    /// Zipf exponent: the n-th worker gets requests in proportion to 1 / n to this power; `None`: the trace names the workers.
    pub zipf: Option<f64>,
    /// Factor on each number of tokens.
    pub lengths: f64,
}

/// Request of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Time of arrival.
    pub at: Duration,
    /// Index of the worker.
    pub worker: usize,
    /// Tokens of the prompt.
    pub context: u32,
    /// Tokens of the answer.
    pub generated: u32,
}

impl Load {
    /// Checks that each row of a trace names one of the workers.
    ///
    /// # Errors
    /// [`TraceError::NoWorkers`], [`TraceError::Unknown`].
    pub fn check(&self, trace: &Trace, workers: &[Worker]) -> Result<(), TraceError> {
        let names: BTreeSet<&str> = workers.iter().map(|worker| worker.name.as_str()).collect();
        for (row, request) in trace.rows.iter().zip(1..) {
            match &row.worker {
                None => return Err(TraceError::NoWorkers),
                Some(name) if !names.contains(name.as_str()) => {
                    return Err(TraceError::Unknown { request, name: name.clone() });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Returns the requests for workers with these names, identical for identical seeds. Rows with an unknown name go to the first worker.
    pub fn draw(&self, trace: &Trace, names: &[&str], seed: u64) -> Vec<Request> {
        let mut random = fastrand::Rng::with_seed(seed);
        let length = self.duration.unwrap_or(trace.span());
        let chances = chances(self.zipf.unwrap_or(0.0), names.len());
        let request = |at, row: &Row, random: &mut fastrand::Rng| {
            let named = row.worker.as_deref().and_then(|name| names.iter().position(|other| *other == name));
            let worker = match self.zipf {
                Some(_) => place(&chances, random.f64()),
                None => named.unwrap_or(0),
            };
            let (context, generated) = (self.tokens(row.context), self.tokens(row.generated));
            Request { at, worker, context, generated }
        };
        let Some(rate) = self.rate else {
            let rows = trace.rows.iter().take_while(|row| row.at <= length);
            return rows.map(|row| request(row.at, row, &mut random)).collect();
        };
        let (mut requests, mut at) = (Vec::new(), 0.0);
        loop {
            at -= (1.0 - random.f64()).ln() / rate;
            if at > length.as_secs_f64() {
                return requests;
            }
            let row = &trace.rows[random.usize(..trace.rows.len())];
            requests.push(request(Duration::from_secs_f64(at), row, &mut random));
        }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped to what fits
    fn tokens(&self, tokens: u32) -> u32 {
        (f64::from(tokens) * self.lengths).round().clamp(1.0, f64::from(u32::MAX)) as u32
    }
}

/// Returns the cumulative probabilities of the workers.
#[allow(clippy::cast_precision_loss)] // places of workers
fn chances(power: f64, count: usize) -> Vec<f64> {
    let weights: Vec<f64> = (1..=count).map(|place| (place as f64).powf(-power)).collect();
    let sum: f64 = weights.iter().sum();
    let mut below = 0.0;
    weights.into_iter().map(|weight| (below += weight / sum, below).1).collect()
}

fn place(chances: &[f64], point: f64) -> usize {
    chances.iter().position(|below| point < *below).unwrap_or(chances.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_requests_and_zipf_prefers_the_first() {
        let trace =
            Trace::parse("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n").unwrap();
        let load = Load {
            rate: Some(10.0),
            duration: Some(Duration::from_secs(300)),
            zipf: Some(1.0),
            lengths: 0.5,
        };
        let requests = load.draw(&trace, &["a", "b", "c"], 7);
        assert_eq!(requests, load.draw(&trace, &["a", "b", "c"], 7));
        assert_ne!(requests, load.draw(&trace, &["a", "b", "c"], 8));
        assert!((2_700..3_300).contains(&requests.len()), "{}", requests.len());
        let of = |worker| requests.iter().filter(|request| request.worker == worker).count();
        assert!(of(0) > of(1) && of(1) > of(2) && of(2) > 400);
        assert_eq!((requests[0].context, requests[0].generated), (187, 22));
    }
}
