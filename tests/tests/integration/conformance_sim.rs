//! The conformance suite on the simulated device: in virtual time, in wall time, and while every verb fails in turn.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::sync::Arc;

use glake_device::{Driver, DriverError, Fault, Faults, Injected, Verb, When};
use glake_sim::conformance::{Failure, Slack, Verdict, checks, run, run_failing};
use glake_sim::{Census, Clock, SimOptions, SimTopology, Simulator};
use glake_units::Bytes;

/// Past the test harness, which keeps what passing tests print.
macro_rules! say {
    ($($what:tt)*) => {{ let _ = writeln!(std::io::stderr(), $($what)*); }};
}

fn server(gpus: u32, clock: Clock) -> Arc<Simulator> {
    let topology = SimTopology::uniform(gpus, Bytes::gib(1));
    Arc::new(Simulator::new(SimOptions { topology, clock, ..SimOptions::default() }).unwrap())
}

fn conforms(sim: &Arc<Simulator>) {
    let driver = Arc::clone(sim) as Arc<dyn Driver>;
    for check in checks() {
        match run(&driver, &check, Slack(Bytes::ZERO)) {
            Ok(Verdict::Passed) => {}
            Ok(Verdict::Skipped(why)) => say!("SKIPPED: {}: {why}", check.name),
            Err(failure) => panic!("{}: {failure}", check.name),
        }
        assert_eq!(sim.census(), Census::default(), "{} left something", check.name);
    }
}

#[test]
fn in_virtual_time() {
    conforms(&server(2, Clock::Virtual));
}

#[test]
fn on_one_device() {
    conforms(&server(1, Clock::Virtual));
}

#[test]
fn in_wall_time() {
    conforms(&server(2, Clock::Wall));
}

/// Each call of each verb fails once: nothing may be left, and the device still conforms.
#[test]
fn while_verbs_fail() {
    let sim = server(2, Clock::Virtual);
    let faults = Arc::new(Faults::new(Arc::clone(&sim) as Arc<dyn Driver>));
    let mut injected = 0;
    for check in checks() {
        for verb in Verb::ALL {
            for n in 1.. {
                let rule = Fault { verb: Some(*verb), when: When::Nth(n), error: Injected::Failed(999) };
                match run_failing(&faults, &check, &[rule]) {
                    Ok(true) => injected += 1,
                    Ok(false) => break,
                    Err(failure) => panic!("{}, {verb} failing the {n}. time: {failure}", check.name),
                }
                let left = sim.census();
                assert_eq!(left, Census::default(), "{}, {verb} failing the {n}. time", check.name);
            }
        }
    }
    assert!(injected > 300, "{injected} calls were made to fail");
    conforms(&sim);
}

/// Each piece of work of each check loses its device once, with none and with half of its bytes: nothing may be left, but
/// where a stream waits for a value that the lost device was to write.
#[test]
fn while_devices_are_lost() {
    let mut lost = 0;
    for check in checks() {
        for verb in [Verb::Copy, Verb::CopyBatch, Verb::Fill, Verb::Launch, Verb::StreamWriteValue] {
            for error in [Injected::Lost(700), Injected::Damaged(700)] {
                for n in 1.. {
                    let sim = server(2, Clock::Virtual);
                    let faults = Arc::new(Faults::new(Arc::clone(&sim) as Arc<dyn Driver>));
                    match run_failing(
                        &faults,
                        &check,
                        &[Fault { verb: Some(verb), when: When::Nth(n), error }],
                    ) {
                        Ok(true) => lost += 1,
                        Ok(false) => break,
                        Err(Failure::Driver(DriverError::Deadlock { .. })) => continue,
                        Err(failure) => panic!("{}, {verb} lost the {n}. time: {failure}", check.name),
                    }
                    assert_eq!(sim.census(), Census::default(), "{}, {verb} lost the {n}. time", check.name);
                }
            }
        }
    }
    assert!(lost > 100, "{lost} times a device was lost");
}
