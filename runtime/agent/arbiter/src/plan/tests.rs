//! What a plan says of six workers on one GPU, and that it says it again.

use std::time::Duration;

use super::*;
use crate::node::NodeFile;

const WORKERS: &str = include_str!("../../../../../examples/workers.toml");
const REQUESTS: &str = include_str!("../../../../../examples/requests.csv");

fn figures(file: &NodeFile, load: Load, policy: Policy, seeds: u64, contention: bool) -> Figures {
    let trace = Trace::parse(REQUESTS).unwrap();
    let names: Vec<&str> = file.workers.iter().map(|worker| worker.name.as_str()).collect();
    let mut tally = Tally::default();
    for seed in 0..seeds {
        let requests = load.draw(&trace, &names, seed);
        tally.add(run(file, &Calibration::of(&file.node), &requests, policy, contention));
    }
    tally.figures(policy.name(), None)
}

fn drawn() -> Load {
    Load { rate: Some(1.0), duration: Some(Duration::from_secs(120)), zipf: Some(0.0), lengths: 1.0 }
}

fn six() -> NodeFile {
    NodeFile::parse(WORKERS).unwrap()
}

#[test]
fn parking_cuts_the_tail_and_every_request_is_answered() {
    let of = |policy| figures(&six(), drawn(), policy, 10, true);
    let all = Policy::ALL.map(of);
    let requests = all[0].requests;
    assert!(all.iter().all(|figures| figures.requests == requests), "{all:#?}");
    let p99 =
        |name: &str| all.iter().find(|figures| figures.policy == name).and_then(|f| f.ttft_p99_s).unwrap();
    assert!(p99("glake") <= 1.5, "{}", p99("glake"));
    assert!(p99("glake-no-preempt") >= 2.5 * p99("glake"));
    assert!(p99("drain-per-tensor") >= 3.0 * p99("glake"));
    assert!(p99("start-stop") >= 20.0 * p99("glake"));
    let denied = |figures: &Figures| figures.denied > 0;
    assert!(all.iter().all(|figures| denied(figures) == (figures.policy == "static")), "{all:#?}");
    let glake = all.last().unwrap();
    assert!(glake.max_gap_p99_s.unwrap() <= 2.0 && glake.link_duty < 0.65, "{glake:#?}");
    assert!(glake.ttft_p99_high_s >= glake.ttft_p99_s && glake.ttft_p99_low_s <= glake.ttft_p99_s);
}

#[test]
fn a_plan_says_the_same_again_and_follows_the_trace() {
    let load = Load { rate: None, duration: None, zipf: None, lengths: 1.0 };
    let file = six();
    let first = figures(&file, load, Policy::Glake, 1, true);
    assert_eq!(first, figures(&file, load, Policy::Glake, 1, true));
    assert_eq!(first.requests, Trace::parse(REQUESTS).unwrap().rows.len());
    let alone = figures(&file, load, Policy::Glake, 1, false);
    assert!(alone.e2e_p50_s < first.e2e_p50_s, "workers that do not contend are faster");
}

#[test]
fn what_fits_waits_for_nobody() {
    let mut file = six();
    file.node.budget = Some(glake_units::Bytes::gib(64));
    for policy in [Policy::Static, Policy::Drain, Policy::Glake] {
        let figures = figures(&file, drawn(), policy, 2, true);
        assert!(
            figures.hit_rate == 1.0 && figures.denied == 0 && figures.refilled_bytes.is_zero(),
            "{figures:#?}"
        );
    }
}

#[test]
fn ranks_on_two_gpus_and_deadlines_are_served_or_denied() {
    let text = "[node]\nbudget = \"12GiB\"\n".to_owned()
        + &["a", "b", "c"].map(|name| {
            format!("[[worker]]\nname = \"{name}\"\nweights = \"16GiB\"\nkv = \"2GiB\"\ngpus = [0, 1]\ndeadline_s = 0.5\n")
        }).join("");
    let file = NodeFile::parse(&text).unwrap();
    file.check_fit().unwrap();
    let figures = figures(&file, drawn(), Policy::Glake, 2, true);
    assert!(figures.denied > 0 && figures.denied < figures.requests / 2, "{figures:#?}");
}

#[test]
fn parking_serves_more_workers() {
    let trace = Trace::parse(REQUESTS).unwrap();
    let mut file = six();
    file.node.budget = Some(glake_units::Bytes::gib(33));
    let calibration = Calibration::default();
    let load = Load { rate: Some(0.3), ..drawn() };
    let asked = Density {
        file: &file,
        calibration: &calibration,
        trace: &trace,
        load,
        seeds: 0..2,
        contention: false,
    };
    let most = |policy| asked.most(policy, 2.0, &mut |_| ());
    let [stopped, static_, drained, ours] =
        [Policy::StartStop, Policy::Static, Policy::Drain, Policy::Glake].map(most);
    assert_eq!((stopped, static_), (3, 3));
    assert!(ours > drained && drained > 3, "{ours} beside {drained}");
}

#[test]
fn what_cannot_be_is_said() {
    let says = |text: &str, needle: &str| {
        let file = NodeFile::parse(text).and_then(|file| file.check_fit().map(|()| file));
        let error = file.unwrap_err().to_string();
        assert!(error.contains(needle), "{error}");
    };
    let worker = |weights: &str| format!("[[worker]]\nname = \"a\"\nweights = \"{weights}\"\n");
    let node = "[node]\nbudget = \"23GiB\"\n";
    says(&format!("{node}{}", worker("40GiB")), "\"a\" fits nowhere: it needs 40.00 GiB of GPU 0");
    says(&worker("1GiB"), "budget of [node] is not given");
    let too_soon = "checkpoint_after_s of [node] is 0.5: give seconds, 1 or more";
    says("[node]\ncheckpoint_after_s = 0.5\n", too_soon);
    says("[node]\nbudget = \"512MiB\"\n", "budget of [node] is 512.00 MiB: give more than the reserve");
    says(node, "there is no worker");
    says(&format!("{node}{0}{0}", worker("1GiB")), "two workers are called \"a\"");
    says(&format!("{node}{}wieghts = 5\n", worker("1GiB")), "unknown field `wieghts`");
    says(
        &format!("{node}{}decode_ms = 0.0\n", worker("1GiB")),
        "decode_ms of worker \"a\" is 0: give a number above 0",
    );
    says(&format!("{node}{}gpus = [1, 1]\n", worker("1GiB")), "name each GPU once");
    says(&format!("{node}{}", worker("0GiB")), "weights of worker \"a\" is 0 B");
    assert!(
        "best".parse::<Policy>().unwrap_err().to_string().contains("choose from static, start-stop, one")
    );
    let calibration = |text: &str| Calibration::parse(text, &six().workers).unwrap_err().to_string();
    assert!(
        calibration("[worker.nobody]\ndecode_ms = 1.0\n").contains("\"nobody\", which the workers' file")
    );
    assert!(calibration("refill_gbps = -1.0\n").contains("refill_gbps is -1"));
}
