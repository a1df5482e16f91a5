//! Layout of a sealed file.
//!
//! ```text
//!  0        4 KiB                                       4 KiB + length
//!  ├ header ┼ page 0 ┼ page 1 ┼ ─ ─ ─ ┼ last page, may be shorter ┼ table: a checksum of 8 bytes a page ┤
//! ```
//!
//! All numbers are little-endian. A page's checksum is XXH3 (64 bits) seeded with the page's index, so that swapped pages are detected as
//! damage. The header holds the table's checksum and its own.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use glake_units::Bytes;

/// Page size: the unit of checksums.
pub const PAGE: Bytes = Bytes::mib(1);
/// Offset of the first page.
pub(super) const HEADER: u64 = 4096;
/// Magic number; the last digit is the version.
const MAGIC: [u8; 8] = *b"GLAKEF01";
/// Number of header bytes in use.
pub(super) const FIELDS: usize = 40;

/// Page size as a slice length.
pub(super) const PAGE_LENGTH: usize = 1 << 20;
const _: () = assert!(PAGE.get() == PAGE_LENGTH as u64);

/// Returns the number of pages of a file with `length` bytes of contents.
pub(super) fn pages(length: Bytes) -> u64 {
    length.get().div_ceil(PAGE.get())
}

/// Returns the size of the whole file, or `None` if it would exceed the largest file offset.
pub(super) fn file_size(length: Bytes) -> Option<u64> {
    let table = pages(length).checked_mul(8)?;
    let size = HEADER.checked_add(length.get())?.checked_add(table)?;
    i64::try_from(size).ok().map(|_| size)
}

/// Returns the checksum of a page.
pub(super) fn checksum(page: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, page)
}

/// Encodes the header of a file with `length` bytes of contents and the given checksum table.
pub(super) fn header(length: Bytes, table: &[u8]) -> [u8; FIELDS] {
    let mut header = [0; FIELDS];
    let fields = [PAGE.get(), length.get(), xxh3_64(table)];
    let numbers = fields.iter().flat_map(|field| field.to_le_bytes());
    for (to, from) in header.iter_mut().zip(MAGIC.into_iter().chain(numbers)) {
        *to = from;
    }
    let (fields, own) = header.split_at_mut(FIELDS - 8);
    own.copy_from_slice(&xxh3_64(fields).to_le_bytes());
    header
}

/// Decodes a header: the length of the contents and the table's checksum. Returns `None` for an invalid header or another version.
pub(super) fn parse(header: &[u8; FIELDS]) -> Option<(Bytes, u64)> {
    let (fields, own) = header.split_last_chunk::<8>()?;
    let (magic, numbers) = fields.split_first_chunk::<8>()?;
    let mut numbers =
        numbers.chunks_exact(8).filter_map(|number| number.try_into().ok()).map(u64::from_le_bytes);
    let (page, length, table) = (numbers.next()?, numbers.next()?, numbers.next()?);
    let whole = *magic == MAGIC && page == PAGE.get() && xxh3_64(fields) == u64::from_le_bytes(*own);
    whole.then_some((Bytes::new(length), table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back_and_no_bit_of_it_may_change() {
        let header = header(Bytes::new(12345), &[1, 2, 3]);
        assert_eq!(parse(&header), Some((Bytes::new(12345), xxh3_64(&[1, 2, 3]))));
        for bit in 0..FIELDS * 8 {
            let mut changed = header;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse(&changed), None, "{bit}");
        }
        assert_eq!(parse(&[0; FIELDS]), None);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(file_size(Bytes::ZERO), Some(HEADER));
        assert_eq!(file_size(Bytes::new((1 << 20) + 1)), Some(HEADER + (1 << 20) + 1 + 16));
        assert_eq!((file_size(Bytes::MAX), file_size(Bytes::new(1 << 63))), (None, None));
        assert_ne!(checksum(0, b"same"), checksum(1, b"same"));
    }
}
