//! CUDA's error codes, translated into errors by what the caller can do about them.

use glake_units::Bytes;

use crate::{Address, DriverError, Refusal, Result, Verb};

/// CUDA's `CUresult` as a plain number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) u32);

impl Code {
    /// Code for a call that the driver lacks.
    pub(super) const MISSING: Code = Code(u32::MAX);
    pub(super) const INVALID_VALUE: Code = Code(1);
    pub(super) const STUB_LIBRARY: Code = Code(34);
    pub(super) const NO_DEVICE: Code = Code(100);
    pub(super) const NOT_READY: Code = Code(600);
    pub(super) const PEER_ACCESS_ALREADY_ENABLED: Code = Code(704);

    /// Returns the error of a call that has neither an address nor a size.
    pub(super) fn of(self, verb: Verb) -> Result<()> {
        self.at(verb, Address(0), Bytes::ZERO)
    }

    /// Returns the error of a call for `size` bytes at `address`.
    pub(super) fn at(self, verb: Verb, address: Address, size: Bytes) -> Result<()> {
        let refused = |reason| Err(DriverError::Refused { verb, address, reason });
        match self.0 {
            0 => Ok(()),
            1 => refused(Refusal::InvalidValue),
            101 => refused(Refusal::UnknownDevice),
            201 => refused(Refusal::UnknownContext),
            2 => Err(DriverError::OutOfMemory { verb, wanted: size }),
            // The call needs a newer driver, or is not supported.
            code @ (36 | 217 | 801) => Err(DriverError::Unsupported { verb, code }),
            u32::MAX => Err(DriverError::Unsupported { verb, code: DriverError::UNSUPPORTED }),
            208 if verb != Verb::HostRegister => refused(Refusal::AlreadyMapped),
            211 => refused(Refusal::NotMapped),
            400 => refused(Refusal::UnknownHandle),
            500 => refused(Refusal::NotFound),
            600 => Err(DriverError::NotReady { verb }),
            705 => refused(Refusal::NoPeerAccess),
            712 if verb == Verb::HostRegister => refused(Refusal::AlreadyMapped),
            713 => refused(Refusal::NotRegistered),
            907 => refused(Refusal::CapturedEvent),
            code @ (900..=906 | 908) => Err(DriverError::Capturing { verb, code }),
            // Deinitialised; uncorrectable ECC and NVLink errors, and contained ones; illegal address, launch
            // timeout, destroyed context, assert; stack error, illegal instruction, misaligned address, address
            // space, program counter, launch failure; leaked tensor memory; external device.
            code @ (4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 911) => {
                Err(DriverError::Sticky { verb, code })
            }
            code => Err(DriverError::of_number(verb, code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_map_to_what_a_caller_can_do() {
        let of = |code| Code(code).at(Verb::Create, Address(7), Bytes::mib(2));
        assert!(of(0).is_ok());
        assert!(
            matches!(of(1), Err(DriverError::Refused { address: Address(7), reason, .. }) if reason == Refusal::InvalidValue)
        );
        assert!(matches!(of(2), Err(DriverError::OutOfMemory { wanted, .. }) if wanted == Bytes::mib(2)));
        assert!(matches!(of(600), Err(DriverError::NotReady { .. })));
        assert!(matches!(of(900), Err(DriverError::Capturing { .. })));
        assert!(matches!(of(700), Err(DriverError::Sticky { code: 700, .. })));
        assert!(matches!(of(719), Err(DriverError::Sticky { code: 719, .. })));
        assert!(matches!(of(12345), Err(DriverError::Failed { code: 12345, .. })));
        assert!(matches!(
            Code::MISSING.of(Verb::Copy),
            Err(DriverError::Unsupported { verb: Verb::Copy, .. })
        ));
    }

    #[test]
    fn the_driver_number_is_kept() {
        for verb in [Verb::Copy, Verb::Map, Verb::HostRegister, Verb::PointerAttributes] {
            for number in 1..=1000 {
                let error = Code(number).at(verb, Address(7), Bytes::mib(2)).unwrap_err();
                assert_eq!(error.code(), Some(number), "{verb}: {error}");
            }
        }
        assert_eq!(Code::MISSING.of(Verb::Copy).unwrap_err().code(), Some(801));
    }
}
