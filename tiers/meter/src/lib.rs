//! Memory usage of each GPU and process, queried without a context.
//!
//! ```text
//! agent, tiers/device ─► glake-meter ─► libnvidia-ml
//! tiers/sim           ─► glake-meter        shared simulated GPUs are a meter too
//! ```
//!
//! A context costs a GPU hundreds of MiB, so a mere observer must not have one. A [`Meter`] returns a snapshot that may be outdated when it
//! is read. [`checkpoint`] removes and restores another process's context;
//! [`ProcessStat`] identifies a process whose ID may have been reused.

pub mod checkpoint;
mod nvml;
mod process;

use glake_units::Bytes;

pub use nvml::{NvLinks, Nvml, pci_address};
pub use process::{ProcessStat, process_name};

/// Memory usage of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuMemory {
    /// Total memory of the GPU.
    pub total: Bytes,
    /// Memory that is not available: of programs, of their contexts, and of processes that have just died.
    pub used: Bytes,
    /// Memory reserved by the driver and the GPU in addition to `used`: some hundred MiB.
    pub reserved: Bytes,
    /// Usage by process, in order of process IDs. The sum is below `used` by memory without a living process and by hidden processes:
    /// inside a container, NVML does not list processes outside.
    pub processes: Vec<ProcessMemory>,
}

/// Memory of one process on a GPU, contexts included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// ID of the process. NVML reports IDs of the host, even if the caller is in another namespace.
    pub pid: u32,
    /// Memory used by the process.
    pub used: Bytes,
}

impl GpuMemory {
    /// Returns the memory available for allocation.
    pub fn free(&self) -> Bytes {
        self.total.saturating_sub(self.used).saturating_sub(self.reserved)
    }

    /// Returns the memory of one process; 0 if it is not listed.
    pub fn of_process(&self, pid: u32) -> Bytes {
        self.processes.iter().find(|process| process.pid == pid).map_or(Bytes::ZERO, |process| process.used)
    }
}

/// Error of a meter.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum MeterError {
    /// The requested GPU is unknown.
    #[error("GPU {gpu} is not known: there are {}", .known.join(", "))]
    Unknown {
        /// GPU that was requested.
        gpu: String,
        /// GPUs that are known.
        known: Vec<String>,
    },
    /// The file of shared simulated GPUs is unreadable.
    #[error("the memory of GPU {gpu} cannot be read: {source}")]
    Os {
        /// GPU that was requested.
        gpu: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// NVML failed to answer.
    #[error("NVML does not report the memory of GPU {gpu}: {source}")]
    Nvml {
        /// GPU that was requested.
        gpu: String,
        /// Error of the library.
        source: nvml_wrapper::error::NvmlError,
    },
}

/// Source of memory readings.
pub trait Meter: Send + Sync {
    /// Returns the GPUs that can be queried: PCI addresses, or numbers of simulated GPUs.
    fn gpus(&self) -> Vec<String>;

    /// Reads the memory of one of [`Meter::gpus`].
    ///
    /// # Errors
    /// [`MeterError`] if there is no such GPU or it does not answer.
    fn read(&self, gpu: &str) -> Result<GpuMemory, MeterError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_and_per_process_memory() {
        let own = ProcessMemory { pid: 7, used: Bytes::gib(2) };
        let (total, used, reserved) = (Bytes::gib(8), Bytes::gib(3), Bytes::mib(512));
        let memory = GpuMemory { total, used, reserved, processes: vec![own] };
        assert_eq!(memory.free(), Bytes::mib(4608));
        assert_eq!((memory.of_process(7), memory.of_process(8)), (Bytes::gib(2), Bytes::ZERO));
        let full = GpuMemory { used: Bytes::gib(8), ..memory };
        assert_eq!(full.free(), Bytes::ZERO, "what is reserved may be counted as used beside the total");
    }

    #[test]
    fn the_error_for_an_unknown_gpu_lists_the_known_ones() {
        let error = MeterError::Unknown { gpu: "9".to_owned(), known: vec!["0".to_owned(), "1".to_owned()] };
        assert_eq!(error.to_string(), "GPU 9 is not known: there are 0, 1");
    }
}
