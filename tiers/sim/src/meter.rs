//! Memory meter for simulated GPUs that processes share; needs no simulator.

use std::path::Path;

use glake_meter::{GpuMemory, Meter, MeterError, ProcessMemory};
use glake_units::Bytes;

use super::ledger::Ledger;
use super::topology::SimTopology;
use glake_device::{DriverError, Result, Verb};

/// Meter of the GPUs that share a folder ([`crate::SimOptions::shared`]), for all processes. GPUs are named by their numbers: "0", "1".
#[derive(Debug)]
pub struct SimMeter {
    ledgers: Vec<Ledger>,
}

impl SimMeter {
    /// Opens the GPUs of a folder; creates it if it does not exist.
    ///
    /// # Errors
    /// [`DriverError::Os`] if the folder cannot be written or holds GPUs of other sizes.
    pub fn open(folder: &Path, topology: &SimTopology) -> Result<SimMeter> {
        let ledgers = topology.gpus.iter().enumerate().map(|(index, gpu)| Ledger::open(folder, index, gpu));
        let ledgers = ledgers.collect::<std::io::Result<_>>();
        Ok(SimMeter { ledgers: ledgers.map_err(|source| DriverError::Os { verb: Verb::Devices, source })? })
    }
}

impl Meter for SimMeter {
    fn gpus(&self) -> Vec<String> {
        (0..self.ledgers.len()).map(|index| index.to_string()).collect()
    }

    fn read(&self, gpu: &str) -> std::result::Result<GpuMemory, MeterError> {
        let ledger = gpu.parse().ok().and_then(|index: usize| self.ledgers.get(index));
        let ledger = ledger.ok_or_else(|| MeterError::Unknown { gpu: gpu.to_owned(), known: self.gpus() })?;
        let (used, living) =
            ledger.read().map_err(|source| MeterError::Os { gpu: gpu.to_owned(), source })?;
        let mut processes: Vec<ProcessMemory> = Vec::new();
        for (pid, used) in living {
            match processes.iter_mut().find(|process| process.pid == pid) {
                Some(known) => known.used = known.used.saturating_add(Bytes::new(used)),
                None => processes.push(ProcessMemory { pid, used: Bytes::new(used) }),
            }
        }
        processes.sort_by_key(|process| process.pid);
        Ok(GpuMemory { total: ledger.capacity(), used: Bytes::new(used), reserved: Bytes::ZERO, processes })
    }
}
