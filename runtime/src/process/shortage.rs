//! Out-of-memory errors: the state of the memory, in torch's words or, without torch, without its name.

use std::fmt;

use glake_device::DeviceId;
use glake_tiers::LeaseShort;
use glake_units::Bytes;
use glake_wire::Holder;

/// State of the memory when a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Device of the request.
    pub device: DeviceId,
    /// Size of the request.
    pub wanted: Bytes,
    /// Total memory of the device.
    pub total: Bytes,
    /// Memory of the device that no process uses.
    pub free: Bytes,
    /// Maximum bytes that the pool may reserve.
    pub limit: Bytes,
    /// Bytes that the pool has reserved.
    pub reserved: Bytes,
    /// Reserved bytes in live blocks.
    pub allocated: Bytes,
    /// Free bytes in whole extents, which could be stitched.
    pub stitchable: Bytes,
    /// Freed bytes that unfinished work of streams still uses.
    pub pending: Bytes,
    /// Whether a stream capture was open, which forbids waiting for pending bytes.
    pub in_capture: bool,
    /// State of the device's lease, if the lease caused the failure.
    pub lease: Option<LeaseShort>,
    /// Other processes on the device, as named by an agent.
    pub holders: Vec<Holder>,
}

impl std::error::Error for Shortage {}

/// Begins with torch's text, because programs search for "CUDA out of memory".
impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tell(f, "Of the reserved memory", ["allocated", "unallocated"])
    }
}

/// Formatter in torch's words: the first sentences are torch's own, because programs search for them.
#[derive(Clone, Copy, Debug)]
pub struct InTorchWords<'a>(pub &'a Shortage);

impl fmt::Display for InTorchWords<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = ["allocated by PyTorch", "reserved by PyTorch but unallocated"];
        self.0.tell(f, "Of the allocated memory", words)
    }
}

impl Shortage {
    /// Writes the text. `of_all` begins the sentence about used and unused memory; `words` names the two.
    fn tell(&self, f: &mut fmt::Formatter<'_>, of_all: &str, words: [&str; 2]) -> fmt::Result {
        let unused = self.reserved.saturating_sub(self.allocated);
        write!(
            f,
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free. ",
            Amount(self.wanted),
            self.device.0,
            Amount(self.total),
            Amount(self.free)
        )?;
        if self.limit < self.total {
            write!(f, "{} allowed; ", Amount(self.limit))?;
        }
        let [live, free] = words;
        write!(f, "{of_all} {} is {live}, and {} is {free}. ", Amount(self.allocated), Amount(unused))?;
        if self.wanted > self.total {
            return f.write_str(
                "The whole GPU is smaller than that, so nothing was given back for it: allocate less.",
            );
        }
        let waited = match self.in_capture {
            true => "but pending work cannot be waited for while a stream capture is open",
            false => "and waited for all pending work first",
        };
        write!(
            f,
            "GLake gave back what it could {waited}: of the unallocated memory {} is in whole free extents that can be \
             stitched, {} is pending on streams. ",
            Amount(self.stitchable),
            Amount(self.pending)
        )?;
        if let Some(LeaseShort { leased, made, wanted, waited, .. }) = self.lease {
            write!(
                f,
                "The lease is what stops it: {} of {} are made, and {} more were not granted within {waited:.1?}: ",
                Amount(made),
                Amount(leased),
                Amount(wanted)
            )?;
            if self.holders.is_empty() {
                return f.write_str("raise it with glake.lease.grant or lease.growth, or allocate less.");
            }
            f.write_str("this GPU is leased to")?;
            for (at, Holder { name, lease }) in self.holders.iter().enumerate() {
                write!(f, "{} {name} ({})", if at == 0 { "" } else { "," }, Amount(*lease))?;
            }
            return f.write_str("; end one of them, raise lease.growth, or allocate less.");
        }
        if self.in_capture {
            return f.write_str("End the capture, or free memory before it begins.");
        }
        let room = self.limit.saturating_sub(self.reserved);
        f.write_str(if self.limit < self.total && room < self.wanted && self.free >= self.wanted {
            "The limit is what stops it: raise it with set_per_process_memory_fraction or pool.limit, or allocate less."
        } else if self.free < self.wanted && self.total.saturating_sub(self.free) > self.reserved.saturating_add(SLACK) {
            "Something else holds memory of this GPU too: end that, or allocate less."
        } else {
            "Live memory alone does not leave room: free some, or allocate less."
        })
    }
}

/// Approximate memory of a CUDA context.
const SLACK: Bytes = Bytes::gib(1);

/// An amount in torch's format.
struct Amount(Bytes);

impl fmt::Display for Amount {
    #[allow(clippy::cast_precision_loss)] // two decimals, for people
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KIB: u64 = 1 << 10;
        let bytes = self.0.get();
        let scaled = |unit: u64| bytes as f64 / unit as f64;
        match bytes {
            0..=KIB => write!(f, "{bytes} bytes"),
            _ if bytes <= KIB.pow(2) => write!(f, "{:.2} KiB", scaled(KIB)),
            _ if bytes <= KIB.pow(3) => write!(f, "{:.2} MiB", scaled(KIB.pow(2))),
            _ => write!(f, "{:.2} GiB", scaled(KIB.pow(3))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shortage() -> Shortage {
        Shortage {
            device: DeviceId(0),
            wanted: Bytes::gib(2),
            total: Bytes::gib(140),
            free: Bytes::mib(1536),
            limit: Bytes::gib(140),
            reserved: Bytes::mib(138 << 10 | 512),
            allocated: Bytes::gib(137),
            stitchable: Bytes::mib(512),
            pending: Bytes::ZERO,
            in_capture: false,
            lease: None,
            holders: Vec::new(),
        }
    }

    #[test]
    fn names_torch_only_in_its_words() {
        let text = shortage().to_string();
        assert!(
            text.contains(
                "is free. Of the reserved memory 137.00 GiB is allocated, and 1.50 GiB is unallocated. GLake "
            ),
            "{text}"
        );
        assert!(!text.contains("PyTorch"), "{text}");
    }

    #[test]
    fn begins_with_torch_s_words() {
        let text = InTorchWords(&shortage()).to_string();
        assert!(
            text.starts_with(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 140.00 GiB of which \
                 1.50 GiB is free. Of the allocated memory 137.00 GiB is allocated by PyTorch, and 1.50 GiB is \
                 reserved by PyTorch but unallocated. GLake "
            ),
            "{text}"
        );
        assert!(
            text.contains("512.00 MiB is in whole free extents") && text.ends_with("allocate less."),
            "{text}"
        );
    }

    #[test]
    fn says_what_stands_in_the_way() {
        let limited = Shortage { limit: Bytes::gib(138), free: Bytes::gib(3), ..shortage() };
        let text = limited.to_string();
        assert!(text.contains("is free. 138.00 GiB allowed; Of the") && text.contains("raise it"), "{text}");
        let waited = std::time::Duration::from_secs(2);
        let short = LeaseShort {
            leased: Bytes::gib(8),
            made: Bytes::gib(7),
            wanted: Bytes::mib(2048),
            waited,
            denied: true,
        };
        let text = Shortage { lease: Some(short), ..shortage() }.to_string();
        for part in
            ["7.00 GiB of 8.00 GiB are made", "2.00 GiB more", "2.0s", "glake.lease.grant or lease.growth"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let holder = |name: &str, gib| Holder { name: name.to_owned(), lease: Bytes::gib(gib) };
        let holders = vec![holder("chat", 90), holder("me", 8)];
        let text = Shortage { lease: Some(short), holders, ..shortage() }.to_string();
        let end = "this GPU is leased to chat (90.00 GiB), me (8.00 GiB); end one of them, raise lease.growth, or allocate less.";
        assert!(text.ends_with(end) && !text.contains("lease.grant"), "{text}");
        let crowded = Shortage { reserved: Bytes::gib(10), allocated: Bytes::gib(9), ..shortage() };
        assert!(crowded.to_string().contains("Something else holds memory"));
        let huge = Shortage { wanted: Bytes::gib(141), ..shortage() };
        let text = huge.to_string();
        assert!(text.ends_with(
            "The whole GPU is smaller than that, so nothing was given back for it: allocate less."
        ));
        assert!(!text.contains("waited"), "it was not: {text}");
    }

    #[test]
    fn amounts_are_torch_s() {
        for (bytes, text) in
            [(1024, "1024 bytes"), (1536, "1.50 KiB"), (1 << 20, "1024.00 KiB"), (1 << 31, "2.00 GiB")]
        {
            assert_eq!(Amount(Bytes::new(bytes)).to_string(), text);
        }
    }
}
