//! How much memory of each GPU is used, and by whom, asked without a context on it.
//!
//! ```text
//! agent, tiers/device ─► glake-meter ─► libnvidia-ml
//! tiers/sim           ─► glake-meter        its simulated GPUs that processes share are a meter too
//! ```
//!
//! A context costs a GPU hundreds of MiB, so that who only watches must not have one. A [`Meter`] is a snapshot at every
//! call: what it told may have changed when it is read. [`checkpoint`] takes such a context, and brings it back.

pub mod checkpoint;
mod nvml;

use glake_units::Bytes;

pub use nvml::{NvLinks, Nvml, pci_address};

/// The memory of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuMemory {
    /// What the GPU has.
    pub total: Bytes,
    /// What nobody can take now: memory of programs, of their contexts, and of processes that have just died.
    pub used: Bytes,
    /// What the driver and the GPU keep for themselves, beside `used`: some hundred MiB, which nobody can take.
    pub reserved: Bytes,
    /// Who uses it, in order of process ids. The sum is below `used` by what belongs to no living process, and by what
    /// is not told: inside a container NVML tells nothing of processes outside.
    pub processes: Vec<ProcessMemory>,
}

/// What one process uses of a GPU, its contexts included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Its id. NVML's are those of the host, also where the caller has a namespace of its own.
    pub pid: u32,
    /// Its memory.
    pub used: Bytes,
}

impl GpuMemory {
    /// What can be taken now.
    pub fn free(&self) -> Bytes {
        self.total.saturating_sub(self.used).saturating_sub(self.reserved)
    }

    /// What one process uses; nothing where it is not listed.
    pub fn of_process(&self, pid: u32) -> Bytes {
        self.processes.iter().find(|process| process.pid == pid).map_or(Bytes::ZERO, |process| process.used)
    }
}

/// Why a meter does not answer.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum MeterError {
    /// There is no such GPU.
    #[error("GPU {gpu} is not known: there are {}", .known.join(", "))]
    Unknown {
        /// What was asked for.
        gpu: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The file that simulated GPUs are counted in cannot be read.
    #[error("the memory of GPU {gpu} cannot be read: {source}")]
    Os {
        /// What was asked for.
        gpu: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// NVML's own error.
    #[error("NVML does not tell the memory of GPU {gpu}: {source}")]
    Nvml {
        /// What was asked for.
        gpu: String,
        /// NVML's error.
        source: nvml_wrapper::error::NvmlError,
    },
}

/// Whoever can tell how much memory of GPUs is used.
pub trait Meter: Send + Sync {
    /// The GPUs that can be asked about: PCI addresses, or the numbers of simulated GPUs.
    fn gpus(&self) -> Vec<String>;

    /// The memory of one of [`Meter::gpus`].
    ///
    /// # Errors
    /// [`MeterError`]: there is no such GPU, or it does not answer.
    fn read(&self, gpu: &str) -> Result<GpuMemory, MeterError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_and_whose_the_rest_is() {
        let own = ProcessMemory { pid: 7, used: Bytes::gib(2) };
        let (total, used, reserved) = (Bytes::gib(8), Bytes::gib(3), Bytes::mib(512));
        let memory = GpuMemory { total, used, reserved, processes: vec![own] };
        assert_eq!(memory.free(), Bytes::mib(4608));
        assert_eq!((memory.of_process(7), memory.of_process(8)), (Bytes::gib(2), Bytes::ZERO));
        let full = GpuMemory { used: Bytes::gib(8), ..memory };
        assert_eq!(full.free(), Bytes::ZERO, "what is reserved may be counted as used beside the total");
    }

    #[test]
    fn an_unknown_gpu_is_told_with_those_that_there_are() {
        let error = MeterError::Unknown { gpu: "9".to_owned(), known: vec!["0".to_owned(), "1".to_owned()] };
        assert_eq!(error.to_string(), "GPU 9 is not known: there are 0, 1");
    }
}
