//! Tests of the planner with six workers on one GPU: figures, and their determinism.

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
        let requests = load.draw(&trace, &names, seed).unwrap();
        tally.add(run(file, &Calibration::of(&file.node), &requests, policy, contention).unwrap());
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
    assert!(p99("glake") <= 1.6, "{}", p99("glake"));
    assert!(p99("glake-no-preempt") >= 2.5 * p99("glake"));
    assert!(p99("drain-per-tensor") >= 3.0 * p99("glake"));
    assert!(p99("start-stop") >= 20.0 * p99("glake"));
    assert!(all.iter().all(|figures| figures.denied == 0), "{all:#?}");
    let glake = all.last().unwrap();
    assert!(glake.max_gap_p99_s.unwrap() <= 2.0 && glake.link_duty < 0.65, "{glake:#?}");
    assert!(glake.ttft_p99_high_s >= glake.ttft_p99_s && glake.ttft_p99_low_s <= glake.ttft_p99_s);
}

/// Twelve workers of 24 GiB with 6 GiB of cache on one GPU with room for four, which two requests a second keep busy.
#[test]
fn turns_stay_short_under_overload() {
    let worker = |n| format!("[[worker]]\nname = \"w{n}\"\nweights = \"24GiB\"\nkv = \"6GiB\"\n");
    let workers: String = (0..12).map(worker).collect();
    let file = NodeFile::parse(&format!("[node]\nbudget = \"130GiB\"\n{workers}")).unwrap();
    let load = Load { rate: Some(2.0), duration: Some(Duration::from_secs(150)), ..drawn() };
    let overload = figures(&file, load, Policy::Glake, 1, true);
    let (first, end) = (overload.ttft_p99_s.unwrap(), overload.e2e_p99_s.unwrap());
    assert!(first <= 5.5 && end <= 60.0 && overload.denied == 0, "{overload:#?}");
}

#[test]
fn a_plan_is_deterministic_and_follows_the_trace() {
    let load = Load { rate: None, duration: None, zipf: None, lengths: 1.0 };
    let file = six();
    let first = figures(&file, load, Policy::Glake, 1, true);
    assert_eq!(first, figures(&file, load, Policy::Glake, 1, true));
    assert_eq!(first.requests, Trace::parse(REQUESTS).unwrap().rows.len());
    let alone = figures(&file, load, Policy::Glake, 1, false);
    assert!(alone.e2e_p50_s < first.e2e_p50_s, "workers that do not contend are faster");
}

/// Returns two workers of 8 GiB with 1 GiB of cache on a GPU of `budget`, and the calibration measured with them.
fn pair(budget: &str, step_ms: &str) -> (NodeFile, Calibration) {
    let worker = |name| format!("[[worker]]\nname = \"{name}\"\nweights = \"8GiB\"\nkv = \"1GiB\"\n");
    let file = format!("[node]\nbudget = \"{budget}\"\n{}{}", worker("a"), worker("b"));
    let pace = |name| format!("[worker.{name}]\nprefill_tok_s = 50000.0\ndecode_ms = 12.0\n{step_ms}\n");
    let calibration =
        "refill_gbps = 50.0\nshrink_gbps = 50.0\nswitch_ms = 0.5\nclean_ms_per_gib = 1.5\npark_ms = 1.0\n";
    let calibration = format!("{calibration}{}{}", pace("a"), pace("b"));
    let file = NodeFile::parse(&file).unwrap();
    let calibration = Calibration::parse(&calibration, &file.workers).unwrap();
    (file, calibration)
}

/// Returns the times to the first token of requests (at, worker, context, generated), in the order of their ends.
fn first_tokens(of: &(NodeFile, Calibration), requests: &[(f64, usize, u32, u32)], policy: Policy) -> Tally {
    let request = |&(at, worker, context, generated): &(f64, usize, u32, u32)| Request {
        at: Duration::from_secs_f64(at),
        worker,
        context,
        generated,
    };
    run(&of.0, &of.1, &requests.iter().map(request).collect::<Vec<_>>(), policy, true).unwrap()
}

fn near(found: &[f64], wanted: &[f64]) {
    let same = |(found, wanted): (&f64, &f64)| (found - wanted).abs() < 5e-5;
    assert!(found.len() == wanted.len() && found.iter().zip(wanted).all(same), "{found:?} is not {wanted:?}");
}

#[test]
fn a_plan_with_a_calibration_reproduces_the_measurements() {
    let of = pair("11GiB", "");
    let link = f64::from(8 << 20) * 1024.0 / 50e9;
    // All of the other worker leaves, except as much as is free already.
    let free = of.0.node.capacity().as_gib() - 2.0 * of.0.node.floor().as_gib() - 9.0;
    let switch = 5e-4 + 1.5e-3 * (9.0 - free) + link + 5e-4;
    let step = 0.012;
    let idle = first_tokens(&of, &[(0.0, 0, 500, 10), (5.0, 1, 1000, 1)], Policy::Glake);
    near(&idle.ttft, &[0.01 + step, switch + 0.02 + step]);
    // The other worker's step has run for 4 ms, and ends before the park.
    let parked = first_tokens(&of, &[(0.0, 0, 500, 500), (1.0, 1, 1000, 1)], Policy::Glake);
    let steps = ((1.0 - 0.01) / step).ceil() * step + 0.01 - 1.0;
    assert!(parked.ttft[0] >= 0.02 + step + switch - 1e-4, "{:?}", parked.ttft);
    assert!(parked.ttft[0] <= steps + 1e-3 + switch + 0.02 + step + 1e-4, "{:?}", parked.ttft);
}

#[test]
fn prompts_of_a_worker_wait_for_each_other_and_for_its_step() {
    let of = pair("24GiB", "");
    // The third request arrives 8 ms before the end of the step.
    let asked = [(0.0, 0, 500, 3), (0.0, 0, 1000, 3), (0.046, 0, 500, 1)];
    let found = first_tokens(&of, &asked, Policy::Glake);
    near(&found.ttft, &[0.042, 0.042, 0.008 + 0.01 + 0.012]);
    near(&found.gaps, &[0.022, 0.022, 0.0]);
}

#[test]
fn running_workers_share_a_gpu_by_their_demand() {
    let beside = [(0.0, 0, 500, 100), (0.4, 1, 1000, 10)];
    // Steps that idle for two thirds of their time leave that time to a prompt, which waits for half a step at most.
    let paced = first_tokens(&pair("24GiB", "step_ms = 4.0"), &beside, Policy::Glake);
    let longest = paced.e2e.iter().copied().fold(0.0, f64::max);
    near(&[longest], &[0.01 + 100.0 * 0.012 - 0.008]);
    assert!(paced.ttft[0] > 0.02 + 0.004 && paced.ttft[0] < 1.5 * 0.024 + 1e-3, "{:?}", paced.ttft);
    let busy = first_tokens(&pair("24GiB", ""), &beside, Policy::Glake);
    near(&busy.ttft[..1], &[2.0 * (0.02 + 0.012)]);
}

#[test]
fn a_want_that_fits_needs_no_victim() {
    let mut file = six();
    file.node.budget = Some(glake_units::Bytes::gib(64));
    for policy in [Policy::StartStop, Policy::DrainPerTensor, Policy::Glake] {
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
    let most = |policy| asked.most(policy, 2.0, &mut |_| ()).unwrap();
    let [stopped, drained, ours] = [Policy::StartStop, Policy::DrainPerTensor, Policy::Glake].map(most);
    assert_eq!(stopped, 3);
    assert!(ours > drained && drained > 3, "{ours} beside {drained}");
}

#[test]
fn impossible_values_are_errors() {
    let says = |text: &str, needle: &str| {
        let file = NodeFile::parse(text).and_then(|file| file.check_fit().map(|()| file));
        let error = file.unwrap_err().to_string();
        assert!(error.contains(needle), "{error}");
    };
    let worker = |weights: &str| format!("[[worker]]\nname = \"a\"\nweights = \"{weights}\"\n");
    let node = "[node]\nbudget = \"23GiB\"\n";
    says(&format!("{node}{}", worker("40GiB")), "\"a\" fits nowhere: it needs 40.00 GiB of GPU 0");
    says(&worker("1GiB"), "budget of [node] is not given");
    let too_soon = "checkpoint_after_s of [node] is 0.5: give seconds, 1 or more, at most 1e9";
    says("[node]\ncheckpoint_after_s = 0.5\n", too_soon);
    says("[node]\nbudget = \"512MiB\"\n", "budget of [node] is 512.00 MiB: give more than the reserve");
    says(node, "there is no worker");
    says(&format!("{node}{0}{0}", worker("1GiB")), "two workers are called \"a\"");
    says(&format!("{node}{}wieghts = 5\n", worker("1GiB")), "unknown field `wieghts`");
    says(
        &format!("{node}{}decode_ms = 0.0\n", worker("1GiB")),
        "decode_ms of worker \"a\" is 0.0: give milliseconds, from 0.001 to 60000",
    );
    says(&format!("{node}{}gpus = [1, 1]\n", worker("1GiB")), "name each GPU once");
    says(&format!("{node}{}", worker("0GiB")), "weights of worker \"a\" is 0 B");
    assert!(
        "best"
            .parse::<Policy>()
            .unwrap_err()
            .to_string()
            .contains("choose from start-stop, drain-per-tensor")
    );
    let calibration = |text: &str| Calibration::parse(text, &six().workers).unwrap_err().to_string();
    assert!(
        calibration("[worker.nobody]\ndecode_ms = 1.0\n").contains("\"nobody\", which the workers' file")
    );
    assert!(calibration("refill_gbps = -1.0\n").contains("refill_gbps is -1"));
}
