//! Whether GPUs have room for a process that is to be restored, by the meter: a driver that finds none does not restore
//! it another time.

use std::fmt;

use glake_meter::Meter;
use glake_units::Bytes;

use crate::records::Record;

/// Minimum free memory in addition to that of the process; a fraction of larger amounts.
const MARGIN: Bytes = Bytes::mib(64);
const PART: u64 = 20;

/// Why the driver is not asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// A GPU has not enough free.
    Short { gpu: String, free: Bytes, needed: Bytes },
    /// GPU whose free memory is unknown.
    Unread { gpu: String, error: String },
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoRoom::Short { gpu, free, needed } => {
                write!(f, "GPU {gpu} has {free} free, and {needed} are needed")
            }
            NoRoom::Unread { gpu, error } => {
                write!(f, "what is free of GPU {gpu} cannot be read: {error}")
            }
        }
    }
}

/// Whether each GPU has room for what the process had there; without a record, whether each has so much free.
pub(crate) fn look(meter: &dyn Meter, record: Option<&Record>, otherwise: Bytes) -> Result<(), NoRoom> {
    let needs: Vec<(String, Bytes)> = match record {
        Some(record) => record.gpus.iter().map(|(gpu, had)| (gpu.clone(), with_margin(*had))).collect(),
        None => meter.gpus().into_iter().map(|gpu| (gpu, otherwise)).collect(),
    };
    if needs.is_empty() {
        let (gpu, error) = ("?".to_owned(), "the meter knows none".to_owned());
        return Err(NoRoom::Unread { gpu, error });
    }
    for (gpu, needed) in needs {
        let free = match meter.read(&gpu) {
            Ok(memory) => memory.free(),
            Err(error) => return Err(NoRoom::Unread { gpu, error: error.to_string() }),
        };
        if free < needed {
            return Err(NoRoom::Short { gpu, free, needed });
        }
    }
    Ok(())
}

fn with_margin(had: Bytes) -> Bytes {
    had.saturating_add(MARGIN.max(Bytes::new(had.get() / PART)))
}

#[cfg(test)]
mod tests {
    use glake_meter::{GpuMemory, MeterError};

    use super::*;

    /// Two GPUs, with so many MiB free.
    struct Two([u64; 2]);

    impl Meter for Two {
        fn gpus(&self) -> Vec<String> {
            vec!["0".to_owned(), "1".to_owned()]
        }
        fn read(&self, gpu: &str) -> Result<GpuMemory, MeterError> {
            let unknown = || MeterError::Unknown { gpu: gpu.to_owned(), known: self.gpus() };
            let place = self.gpus().iter().position(|known| known == gpu).ok_or_else(unknown)?;
            let (total, reserved) = (Bytes::gib(80), Bytes::mib(512));
            let used = total.saturating_sub(reserved).saturating_sub(Bytes::mib(self.0[place]));
            Ok(GpuMemory { total, used, reserved, processes: Vec::new() })
        }
    }

    fn record(gpu: &str, mib: u64) -> Record {
        Record { gpus: [(gpu.to_owned(), Bytes::mib(mib))].into() }
    }

    #[test]
    fn what_it_had_and_a_margin_has_to_be_free() {
        for (had, needed) in [(680, 744), (1280, 1344), (2000, 2100), (0, 64)] {
            assert_eq!(look(&Two([needed, 0]), Some(&record("0", had)), Bytes::ZERO), Ok(()), "{had}");
            let short = look(&Two([needed - 1, 0]), Some(&record("0", had)), Bytes::ZERO);
            let (free, needed) = (Bytes::mib(needed - 1), Bytes::mib(needed));
            assert_eq!(short, Err(NoRoom::Short { gpu: "0".to_owned(), free, needed }));
        }
    }

    #[test]
    fn without_a_record_each_gpu_has_to_have_so_much() {
        assert_eq!(look(&Two([1024, 1024]), None, Bytes::gib(1)), Ok(()));
        let short = look(&Two([4096, 1023]), None, Bytes::gib(1));
        assert!(matches!(short, Err(NoRoom::Short { gpu, .. }) if gpu == "1"));
    }

    #[test]
    fn what_cannot_be_read_is_no_room() {
        let unread = look(&Two([4096, 4096]), Some(&record("7", 640)), Bytes::ZERO).unwrap_err();
        assert_eq!(
            unread.to_string(),
            "what is free of GPU 7 cannot be read: GPU 7 is not known: there are 0, 1"
        );
        let empty = look(&Two([4096, 4096]), Some(&Record::default()), Bytes::ZERO);
        assert!(matches!(empty, Err(NoRoom::Unread { .. })));
    }
}
