//! Bytes that change while they are elsewhere.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};

use super::*;
use crate::FileError;

/// Changes one byte of a copy in memory, once, behind everybody's back: when its way back begins.
fn flip_on_the_way_in(fixture: &Fixture) {
    let (host, peer, pool) = (fixture.host.clone(), fixture.peer.clone(), fixture.pool.clone());
    let mut flipped = false;
    fixture.meddle(move |copies| {
        let home = |span: &Span| span.device() == Some(pool.device());
        let Some((_, from)) = copies.iter().find(|(to, from)| !flipped && home(to) && !home(from)) else {
            return Ok(());
        };
        flipped = true;
        match from.device() {
            Some(_) => {
                let mut byte = [0];
                peer.read(from.start(), &mut byte)?;
                peer.write(from.start(), &[byte[0] ^ 16])?;
            }
            None => {
                let mut other = host.take(Bytes::new(1))?;
                let span = other.span(Bytes::ZERO, Bytes::new(1)).unwrap();
                let first = from.part(Bytes::ZERO, Bytes::new(1)).unwrap();
                first.copy_on_host(&span)?;
                drop(span);
                other.as_mut_slice().unwrap()[0] ^= 16;
                other.span(Bytes::ZERO, Bytes::new(1)).unwrap().copy_on_host(&first)?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_flipped_byte_is_found_and_the_others_go_on() {
    for to in ALL {
        let mut fixture = fixture();
        fixture.furnish();
        fixture.shrink(to, true).unwrap();
        let extents = fixture.residencies().len();
        flip_on_the_way_in(&fixture);
        let damaged = fixture.refill(true).unwrap_err();
        let text = damaged.to_string();
        let RegionError::Damaged { device, tag, address, size, place, blocks, source } = damaged else {
            panic!("{damaged}")
        };
        assert_eq!((device, &*tag, size, place), (GPU, "weights", EXTENT, fixture.store(to).place()));
        assert!(source.is_none() && text.contains("load these bytes from their source again"), "{text}");
        assert!((address.0 - fixture.pool.base().0).is_multiple_of(EXTENT.get()), "{address}");
        assert!(!blocks.is_empty());
        for (block, size) in blocks.into_vec() {
            let end = glake_device::Address(block.0 + size.get());
            assert!(block.0 < address.0 + EXTENT.get() && end > address, "{block} is not in the extent");
            assert!(
                fixture.pool.block(block).is_some_and(|(own, _)| own == size),
                "{block} is no live block"
            );
            assert!(text.contains(&format!("{size} at {block}")), "{text}");
        }
        let halfway = Residency::Interrupted { at: place };
        let stopped = fixture.residencies().iter().filter(|found| **found == halfway).count();
        let back = fixture.residencies().iter().filter(|found| **found == Residency::NEW).count();
        assert_eq!((stopped, back), (1, extents - 1), "{to:?}");
        // Of a file it was the bytes on the way, so the next time is a good one; of memory they stay as they are.
        match fixture.refill(true) {
            Ok(_) => assert_eq!((to, fixture.wrong_bytes()), (To::File, 0)),
            Err(RegionError::Damaged { .. }) => {
                fixture.refill(false).unwrap();
                assert_eq!(fixture.wrong_bytes(), 1, "{to:?}: it is taken as it is");
            }
            Err(other) => panic!("{other}"),
        }
        fixture.end();
    }
}

#[test]
fn without_checks_nobody_is_told() {
    for (out, back) in [(false, true), (true, false)] {
        let mut fixture = fixture();
        fixture.furnish();
        fixture.shrink(To::Host, out).unwrap();
        flip_on_the_way_in(&fixture);
        fixture.refill(back).unwrap();
        assert_eq!(fixture.wrong_bytes(), 1);
        fixture.end();
    }
}

/// The sealed files, the largest first.
fn sealed(fixture: &Fixture) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(fixture.files.path()).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "extent")).collect();
    paths.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).unwrap().len()));
    paths
}

#[test]
fn a_damaged_file_is_found_with_checks_and_without() {
    for (checked, cut) in [(false, false), (true, false), (true, true)] {
        let mut fixture = fixture();
        fixture.furnish();
        fixture.shrink(To::File, checked).unwrap();
        let path = &sealed(&fixture)[0];
        fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        if cut {
            file.set_len(2 << 20).unwrap();
        } else {
            let mut byte = [0];
            file.read_exact_at(&mut byte, 3 << 20).unwrap();
            file.write_all_at(&[byte[0] ^ 1], 3 << 20).unwrap();
        }
        drop(file);
        for _ in 0..2 {
            let damaged = fixture.refill(checked).unwrap_err();
            let text = damaged.to_string();
            let RegionError::Damaged { place: Place::File, source: Some(source), .. } = damaged else {
                panic!("{damaged}")
            };
            let found = matches!(*source, FileError::Damaged { page: 2, .. } | FileError::NotWhole { .. });
            assert!(found && !text.contains("without checks"), "{text}");
            let back = fixture.residencies().iter().filter(|found| **found == Residency::NEW).count();
            assert_eq!(back, fixture.residencies().len() - 1);
        }
        fixture.end();
    }
}
