//! Regions of a process of simulated devices, from the outside.

mod clean;
mod commit;
mod leases;
mod live;
mod moves;
mod parks;
mod plain;
mod pools;
mod refusals;
mod reports;
mod swap;
mod threads;
mod uses;
mod walk;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use glake_device::{Address, DeviceId, Driver, Faults, Stream};
use glake_sim::pattern;
use glake_tiers::{CopyPolicy, Place, Policy, RegionOptions, SkipReason};
use glake_units::Bytes;

use super::super::{PoolId, Process, ProcessError, Tags, WhenClosed};
use super::*;
use crate::config::{Config, Environment, Sources};

const STREAM: Stream = Stream(0);
const SMALL: &str = "tiers = { extent = \"4MiB\", host_spare = 0, drain_timeout_ms = 60000 }\n\
                     transfer.calibrations = \"\"\n";

pub(super) fn started(settings: &str) -> Process {
    Process::start(configured(settings)).unwrap()
}

/// Starts a process whose uses may be parked again after `quantum` milliseconds.
fn started_with_quantum(settings: &str, quantum: u64) -> Process {
    let mut config = configured(settings);
    config.tiers.park_quantum_ms = quantum;
    Process::start(config).unwrap()
}

/// Starts a process whose driver can be made to fail.
fn started_with_faults(settings: &str, change: impl FnOnce(&mut Config)) -> (Process, Arc<Faults>) {
    let mut config = configured(settings);
    change(&mut config);
    let mut faults = None;
    let around =
        |driver: Arc<dyn Driver>| -> Arc<dyn Driver> { faults.insert(Arc::new(Faults::new(driver))).clone() };
    let process = Process::start_on(config, around).unwrap();
    (process, faults.unwrap())
}

fn configured(settings: &str) -> Config {
    let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
    let sources = Sources { environment, ..Sources::default() };
    let sources = sources.with_overrides("test", SMALL).unwrap().with_overrides("test", settings).unwrap();
    let mut config = sources.load().unwrap();
    config.tiers.host_arena = mib(16);
    config
}

fn mib(n: u64) -> Bytes {
    Bytes::mib(n)
}

fn options(tag: &str, policy: Policy, host_copy: CopyPolicy) -> RegionOptions {
    RegionOptions { policy, host_copy, ..RegionOptions::of(tag) }
}

/// A block whose bytes tell its seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    device: i64,
    pub(super) address: Address,
    size: Bytes,
    seed: u64,
}

fn bytes(size: Bytes, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(size.get()).unwrap()];
    pattern::fill(&mut bytes, 0, seed);
    bytes
}

impl Process {
    pub(super) fn written(&self, device: i64, size: Bytes, seed: u64) -> Written {
        let address = self.malloc(device, size, STREAM).unwrap();
        let pool = &self.device(device).unwrap().started().unwrap().pool;
        pool.write(address, &bytes(size, seed)).unwrap();
        Written { device, address, size, seed }
    }

    pub(super) fn written_in(&self, tag: &str, device: i64, size: Bytes, seed: u64) -> Written {
        self.regions().enter(tag).unwrap();
        let written = self.written(device, size, seed);
        self.regions().leave().unwrap();
        written
    }

    pub(super) fn check(&self, written: &Written) {
        let pool = &self.device(written.device).unwrap().started().unwrap().pool;
        let mut found = vec![0; usize::try_from(written.size.get()).unwrap()];
        pool.read(written.address, &mut found).unwrap();
        assert!(pattern::matches(&found, written.seed), "{written:?}");
    }

    fn reserved(&self, device: i64) -> Bytes {
        Bytes::new(self.reports().stats(device).unwrap().all.reserved_bytes.current.unsigned_abs())
    }

    fn view(&self, tag: &str, device: u32) -> RegionView {
        let views = self.regions().views().unwrap();
        views.into_iter().find(|view| view.tag == tag && view.device == Some(DeviceId(device))).unwrap()
    }

    /// Everything is freed and given back.
    pub(super) fn end(self, blocks: impl IntoIterator<Item = Written>) {
        blocks.into_iter().for_each(|block| self.free(block.address).unwrap());
        self.regions().refill(&Refill::default()).unwrap();
        self.trim(None, Bytes::ZERO).unwrap();
        for device in 0..4 {
            assert_eq!(self.reserved(device), Bytes::ZERO, "of device {device}");
        }
        assert_eq!(self.regions().gate().view().closed, Vec::<String>::new());
        assert!(self.flags.is_quiet());
        // What is cleaned just now is given up soon after its blocks were freed.
        let hosts = || self.regions.set().stores.host_statistics();
        let is_free = || hosts().iter().all(|host| host.in_use.is_zero() && host.retained.is_zero());
        let begin = std::time::Instant::now();
        while !is_free() {
            assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", hosts());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn of(tags: &[&str]) -> Option<Vec<String>> {
    Some(tags.iter().map(|tag| (*tag).to_owned()).collect())
}

fn shrink_of(tags: &[&str]) -> Shrink {
    Shrink { tags: of(tags), ..Shrink::default() }
}

fn refill_of(tags: &[&str]) -> Refill {
    Refill { tags: of(tags), ..Refill::default() }
}
