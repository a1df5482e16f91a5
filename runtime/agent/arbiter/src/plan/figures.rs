//! Results of simulated runs.

use glake_units::Bytes;
use serde::Serialize;

/// Results of the runs of one policy, one run per seed.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Seconds to the first token of each served request.
    pub ttft: Vec<f64>,
    pub(super) e2e: Vec<f64>,
    pub(super) gaps: Vec<f64>,
    /// The 99th percentile of each run.
    pub(super) p99s: Vec<f64>,
    pub(super) hits: usize,
    pub(super) denied: usize,
    pub(super) gpu_seconds: f64,
    pub(super) link_seconds: f64,
    pub(super) refilled: Bytes,
}

/// Figures of one policy. Times are in seconds since a request arrived; denied requests count in `denied` only.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Name of the policy.
    pub policy: String,
    /// Requests of all seeds together.
    pub requests: usize,
    /// Median time to the first token.
    pub ttft_p50_s: Option<f64>,
    /// The 99th percentile of the time to the first token, over all seeds together.
    pub ttft_p99_s: Option<f64>,
    /// The 5th percentile over the 99th percentiles of the seeds.
    pub ttft_p99_low_s: Option<f64>,
    /// The 95th percentile over the 99th percentiles of the seeds.
    pub ttft_p99_high_s: Option<f64>,
    /// Median time to the last token.
    pub e2e_p50_s: Option<f64>,
    /// The 99th percentile of the time to the last token.
    pub e2e_p99_s: Option<f64>,
    /// The 99th percentile of the longest gap between two tokens of a request.
    pub max_gap_p99_s: Option<f64>,
    /// Fraction of requests whose worker was resident at arrival.
    pub hit_rate: f64,
    /// GPUs times seconds per served request.
    pub gpu_seconds_per_request: Option<f64>,
    /// Bytes copied to the GPUs.
    pub refilled_bytes: Bytes,
    /// Copied bytes per served request.
    pub bytes_per_request: Option<f64>,
    /// Fraction of the time in which refills used a link.
    pub link_duty: f64,
    /// Requests that were denied.
    pub denied: usize,
    /// Number of such workers that a GPU could serve; `None` unless requested.
    pub density: Option<usize>,
}

impl Tally {
    /// Adds the results of another run.
    pub fn add(&mut self, mut run: Tally) {
        self.p99s.extend(quantile(&mut run.ttft, 0.99));
        self.ttft.append(&mut run.ttft);
        self.e2e.append(&mut run.e2e);
        self.gaps.append(&mut run.gaps);
        self.hits += run.hits;
        self.denied += run.denied;
        self.gpu_seconds += run.gpu_seconds;
        self.link_seconds += run.link_seconds;
        self.refilled = self.refilled.saturating_add(run.refilled);
    }

    /// Returns whether all requests were served, 99 % of them with a first token within `slo` seconds.
    pub fn holds(&mut self, slo: f64) -> bool {
        self.denied == 0 && quantile(&mut self.ttft, 0.99).is_none_or(|p99| p99 <= slo)
    }

    /// Summarizes the runs as figures.
    #[allow(clippy::cast_precision_loss)] // counts and bytes of a run
    pub fn figures(mut self, policy: &str, density: Option<usize>) -> Figures {
        let served = self.ttft.len();
        let each = |sum: f64| (served > 0).then(|| sum / served as f64);
        let requests = served + self.denied;
        Figures {
            policy: policy.to_owned(),
            requests,
            ttft_p50_s: quantile(&mut self.ttft, 0.5),
            ttft_p99_s: quantile(&mut self.ttft, 0.99),
            ttft_p99_low_s: quantile(&mut self.p99s, 0.05),
            ttft_p99_high_s: quantile(&mut self.p99s, 0.95),
            e2e_p50_s: quantile(&mut self.e2e, 0.5),
            e2e_p99_s: quantile(&mut self.e2e, 0.99),
            max_gap_p99_s: quantile(&mut self.gaps, 0.99),
            hit_rate: self.hits as f64 / requests.max(1) as f64,
            gpu_seconds_per_request: each(self.gpu_seconds),
            refilled_bytes: self.refilled,
            bytes_per_request: each(self.refilled.get() as f64),
            link_duty: if self.gpu_seconds > 0.0 { self.link_seconds / self.gpu_seconds } else { 0.0 },
            denied: self.denied,
            density,
        }
    }
}

/// Returns the quantile of `values` at the fraction `part`.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // places in a list
fn quantile(values: &mut [f64], part: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let place = (part * values.len() as f64).ceil() as usize;
    values.get(place.max(1) - 1).copied()
}
