//! A set of devices.

use crate::DeviceId;

/// A set of the first 64 devices: more than any server has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceSet(u64);

impl DeviceSet {
    /// No device.
    pub const EMPTY: DeviceSet = DeviceSet(0);
    /// Every device.
    pub const ALL: DeviceSet = DeviceSet(u64::MAX);

    /// One device; none where the id is past 63.
    pub const fn of(device: DeviceId) -> DeviceSet {
        if device.0 < 64 { DeviceSet(1 << device.0) } else { DeviceSet(0) }
    }

    /// The devices of both.
    pub const fn union(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 | other.0)
    }

    /// The devices of each of both.
    pub const fn intersection(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 & other.0)
    }

    /// The devices that are not of `other`.
    pub const fn without(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 & !other.0)
    }

    /// Whether the device is of them.
    pub const fn contains(self, device: DeviceId) -> bool {
        device.0 < 64 && self.0 >> device.0 & 1 == 1
    }

    /// Whether every device is one of `other` too.
    pub const fn is_subset(self, other: DeviceSet) -> bool {
        self.0 & !other.0 == 0
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// One bit a device, for atomics.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The set of [`DeviceSet::bits`].
    pub const fn from_bits(bits: u64) -> DeviceSet {
        DeviceSet(bits)
    }

    /// How many devices.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The devices, in order.
    pub fn iter(self) -> impl Iterator<Item = DeviceId> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let device = DeviceId(left.trailing_zeros());
            // Without its lowest bit; of an empty set there is none.
            left &= left.checked_sub(1)?;
            Some(device)
        })
    }
}

impl FromIterator<DeviceId> for DeviceSet {
    fn from_iter<I: IntoIterator<Item = DeviceId>>(devices: I) -> DeviceSet {
        devices.into_iter().fold(DeviceSet::EMPTY, |set, device| set.union(DeviceSet::of(device)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_a_set() {
        let set: DeviceSet = [DeviceId(3), DeviceId(0), DeviceId(3), DeviceId(99)].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [DeviceId(0), DeviceId(3)]);
        assert!(DeviceSet::of(DeviceId(3)).is_subset(set) && !set.is_subset(DeviceSet::of(DeviceId(3))));
        assert_eq!(set.without(DeviceSet::of(DeviceId(0))), DeviceSet::of(DeviceId(3)));
        assert!(!set.contains(DeviceId(99)) && DeviceSet::of(DeviceId(64)).is_empty());
        assert_eq!((set.len(), DeviceSet::ALL.iter().count(), DeviceSet::EMPTY.iter().count()), (2, 64, 0));
        assert_eq!(DeviceSet::from_bits(set.bits()), set);
        assert_eq!(set.intersection(DeviceSet::of(DeviceId(3))), DeviceSet::of(DeviceId(3)));
    }
}
