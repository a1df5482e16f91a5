//! The file tier over real files.

#[cfg(target_arch = "x86_64")]
mod broken;
mod full;
#[cfg(target_arch = "x86_64")]
mod kill;

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};

use proptest::prelude::*;
use tempfile::TempDir;

use super::sealed::{Contents, HEADER_BYTES};
use super::*;

fn tier() -> (TempDir, FileTier) {
    let root = tempfile::tempdir().unwrap();
    let tier = FileTier::open(&root.path().join("extents")).unwrap();
    (root, tier)
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 3 * 31 % 251).to_le_bytes()[0]).collect()
}

fn sealed(tier: &FileTier, bytes: &[u8]) -> SealedFile {
    let mut draft = tier.create(Bytes::new(bytes.len() as u64)).unwrap();
    draft.write(bytes).unwrap();
    draft.seal().unwrap()
}

fn names(tier: &FileTier) -> Vec<String> {
    let entries = fs::read_dir(tier.path()).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// At a process's own end no byte stays, whoever still has a file, and whoever is making one.
#[test]
fn a_tier_that_is_closed_leaves_nothing() {
    let (_root, tier) = tier();
    let other = tier.path().join("other.txt");
    fs::write(&other, "another's").unwrap();
    let sealed = |length| {
        let mut draft = tier.create(Bytes::new(length)).unwrap();
        draft.write(&bytes(usize::try_from(length).unwrap())).unwrap();
        draft
    };
    let (whole, begun) = (sealed(5000).seal().unwrap(), sealed(7000));
    assert_eq!(names(&tier).len(), 4);
    assert_eq!(tier.close().unwrap().files, 2);
    assert_eq!(names(&tier), ["other.txt"]);
    assert!(matches!(begun.seal(), Err(FileError::Closed { .. })));
    assert!(matches!(tier.create(Bytes::new(1)), Err(FileError::Closed { .. })));
    assert_eq!(tier.close().unwrap(), Collected::default());
    drop(whole);
    assert_eq!((names(&tier).len(), tier.statistics()), (1, FileStatistics::default()));
}

/// However it meets those who make files, none stays.
#[test]
fn a_tier_is_closed_while_files_are_made() {
    for _ in 0..20 {
        let (_root, tier) = tier();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut kept = Vec::new();
                    while let Ok(mut draft) = tier.create(Bytes::new(100)) {
                        draft.write(&bytes(100)).unwrap();
                        match draft.seal() {
                            Ok(file) => kept.push(file),
                            Err(error) => assert!(matches!(error, FileError::Closed { .. }), "{error}"),
                        }
                    }
                    // Their names are gone before they are.
                    assert_eq!(names(&tier), Vec::<String>::new());
                });
            }
            while names(&tier).len() < 9 {
                std::thread::yield_now();
            }
            tier.close().unwrap();
        });
    }
}

/// Changes a byte behind the tier's back.
fn flip(path: &Path, at: u64) {
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o400)).unwrap();
}

#[test]
fn what_is_dropped_is_gone() {
    let (_root, tier) = tier();
    let mut draft = tier.create(Bytes::mib(3)).unwrap();
    draft.write(&bytes(5000)).unwrap();
    let file = sealed(&tier, &bytes(100));
    assert_eq!(tier.statistics(), FileStatistics { files: 2, bytes: Bytes::new((3 << 20) + 100) });
    assert_eq!(names(&tier).len(), 3);
    drop((draft, file));
    assert_eq!(tier.statistics(), FileStatistics::default());
    assert_eq!(names(&tier).len(), 1, "the lock");
    let path = tier.path().to_path_buf();
    drop(tier);
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn space_is_there_before_the_first_byte() {
    let (_root, tier) = tier();
    let draft = tier.create(Bytes::mib(3)).unwrap();
    let name = names(&tier).into_iter().find(|name| name.ends_with(".part")).unwrap();
    let found = fs::metadata(tier.path().join(name)).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&found) * 512 >= 3 << 20);
    assert_eq!((draft.written(), draft.length()), (Bytes::ZERO, Bytes::mib(3)));
}

#[test]
fn only_whole_pages_are_read_and_only_whole_files_sealed() {
    let (_root, tier) = tier();
    let ours = bytes((2 << 20) + 7);
    let mut draft = tier.create(Bytes::new(ours.len() as u64)).unwrap();
    let refused =
        |answer: Result<()>| assert!(matches!(answer, Err(FileError::NoSuchRange { .. })), "{answer:?}");
    refused(draft.write(&vec![0; ours.len() + 1]));
    draft.write(&ours[1..]).unwrap();
    refused(draft.write(&[0; 2]));
    refused(draft.seal().map(drop));
    assert_eq!(tier.statistics(), FileStatistics::default());
    let file = sealed(&tier, &ours);
    let mut page = vec![0; 1 << 20];
    refused(file.read(Bytes::new(1), &mut page));
    refused(file.read(Bytes::ZERO, &mut page[1..]));
    refused(file.read(Bytes::mib(2), &mut page));
    refused(file.read(Bytes::MAX, &mut page));
    file.read(Bytes::mib(1), &mut page).unwrap();
    assert!(page == ours[1 << 20..2 << 20]);
    file.read(Bytes::mib(2), &mut page[..7]).unwrap();
    assert!(page[..7] == ours[2 << 20..]);
    file.read(Bytes::mib(2), &mut []).unwrap();
    let empty = sealed(&tier, &[]);
    empty.read(Bytes::ZERO, &mut []).unwrap();
}

#[test]
fn a_flipped_byte_is_found_with_its_page() {
    let (_root, tier) = tier();
    let ours = bytes((3 << 20) + 9);
    for (at, page) in [(0, 0), ((1 << 20) - 1, 0), (1 << 20, 1), ((3 << 20) + 8, 3)] {
        let file = sealed(&tier, &ours);
        flip(file.path(), HEADER_BYTES + at);
        let mut theirs = vec![0; ours.len()];
        match file.read(Bytes::ZERO, &mut theirs).unwrap_err() {
            error @ FileError::Damaged { page: found, pages: 4, .. } => {
                assert_eq!(found, page);
                assert!(error.to_string().contains(&format!("page {page} of 4 is damaged")), "{error}");
            }
            other => panic!("{other}"),
        }
        let good = (page + 1) % 4;
        let size = if good == 3 { 9 } else { 1 << 20 };
        file.read(Bytes::mib(good), &mut theirs[..size]).unwrap();
    }
}

#[test]
fn a_file_that_is_not_whole_is_not_opened() {
    let (_root, tier) = tier();
    let ours = bytes((1 << 20) + 9);
    let table = HEADER_BYTES + ours.len() as u64;
    let flaw = |path: &Path| match Contents::open(path) {
        Err(FileError::NotWhole { flaw, .. }) => flaw,
        other => panic!("{other:?}"),
    };
    for (at, expected) in
        [(0, Flaw::Header), (9, Flaw::Header), (39, Flaw::Header), (table + 15, Flaw::Table)]
    {
        let file = sealed(&tier, &ours);
        flip(file.path(), at);
        assert_eq!(flaw(file.path()), expected, "{at}");
    }
    for (length, expected) in
        [(0, Flaw::Header), (39, Flaw::Header), (4096, Flaw::Length), (table, Flaw::Length)]
    {
        let file = sealed(&tier, &ours);
        fs::set_permissions(file.path(), Permissions::from_mode(0o600)).unwrap();
        OpenOptions::new().write(true).open(file.path()).unwrap().set_len(length).unwrap();
        assert_eq!(flaw(file.path()), expected, "{length}");
        let read = file.read(Bytes::ZERO, &mut vec![0; ours.len()]);
        assert_eq!(read.is_ok(), length == table, "who has the table needs it no more: {length}");
    }
}

#[test]
fn a_file_that_others_may_write_to_is_not_opened() {
    let (_root, tier) = tier();
    let file = sealed(&tier, &bytes(100));
    fs::set_permissions(file.path(), Permissions::from_mode(0o660)).unwrap();
    let refused = Contents::open(file.path()).unwrap_err();
    assert!(matches!(refused, FileError::NotWhole { flaw: Flaw::Open, .. }), "{refused}");
    let refused = Contents::open(Path::new("/dev/null")).unwrap_err();
    assert!(matches!(refused, FileError::NotWhole { flaw: Flaw::Open, .. }), "{refused}");
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let root = tempfile::tempdir().unwrap();
    fs::set_permissions(root.path(), Permissions::from_mode(0o777)).unwrap();
    let error = FileTier::open(root.path()).unwrap_err();
    assert!(matches!(error, FileError::OpenDirectory { mode: 0o777, .. }), "{error}");
    fs::set_permissions(root.path(), Permissions::from_mode(0o700)).unwrap();
    let tier = FileTier::open(root.path()).unwrap();
    assert!(matches!(FileTier::open(root.path()), Err(FileError::InUse { .. })));
    drop(tier);
    FileTier::open(root.path()).unwrap();
    assert!(matches!(
        FileTier::open(Path::new("/dev/null")),
        Err(FileError::Io { step: FileStep::Open, .. })
    ));
}

#[test]
fn only_what_is_left_of_the_dead_is_collected() {
    let (_root, tier) = tier();
    let this = Owner::of(std::process::id()).unwrap();
    let text = this.name(Kind::Lock);
    let (pid, start) =
        text.strip_prefix("glake-").unwrap().strip_suffix(".owner").unwrap().split_once('-').unwrap();
    let later: u64 = start.parse::<u64>().unwrap() + 1;
    let put = |name: &str| fs::write(tier.path().join(name), b"left").unwrap();
    let reused = [format!("glake-{pid}-{later}-0.part"), format!("glake-{pid}-{later}-1.extent")];
    let locked = [format!("glake-{}-1-0.extent", u32::MAX), format!("glake-{}-1.owner", u32::MAX)];
    let others = ["glake-1.txt".to_owned(), "notes".to_owned()];
    reused.iter().chain(&locked).chain(&others).for_each(|name| put(name));
    let elsewhere = File::open(tier.path().join(&locked[1])).unwrap();
    elsewhere.lock().unwrap();
    let mine = sealed(&tier, &bytes(10));
    assert_eq!(tier.collect().unwrap(), Collected { files: 2, bytes: Bytes::new(8) });
    let left = names(&tier);
    assert!(reused.iter().all(|name| !left.contains(name)), "a later process has this number: {left:?}");
    assert!(
        locked.iter().chain(&others).all(|name| left.contains(name)),
        "not ours, or alive elsewhere: {left:?}"
    );
    mine.read(Bytes::ZERO, &mut [0; 10]).unwrap();
    drop(elsewhere);
    assert_eq!(tier.collect().unwrap().files, 1);
    assert_eq!(names(&tier).len(), 4, "the lock, a file and what is not ours");
}

/// Where locks do not tell, what is seen of the process does.
#[test]
fn a_living_process_keeps_its_files_without_a_lock_too() {
    let (_root, tier) = tier();
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let owner = Owner::of(other.id()).unwrap();
    fs::write(tier.path().join(owner.name(Kind::Sealed(0))), b"alive").unwrap();
    assert_eq!(tier.collect().unwrap(), Collected::default());
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(tier.collect().unwrap(), Collected { files: 1, bytes: Bytes::new(5) });
}

#[test]
#[ignore = "a measurement"]
fn files_cost() {
    let ours = bytes(256 << 20);
    let rate = |what: &str, since: std::time::Instant| {
        println!("{what}: {:.2} GB/s", ours.len() as f64 / since.elapsed().as_secs_f64() / 1e9);
    };
    let (_root, tier) = tier();
    for _ in 0..3 {
        let begun = std::time::Instant::now();
        let mut draft = tier.create(Bytes::mib(256)).unwrap();
        draft.write(&ours).unwrap();
        rate("written", begun);
        let file = draft.seal().unwrap();
        rate("written and sealed", begun);
        let mut theirs = vec![1; ours.len()];
        let begun = std::time::Instant::now();
        file.read(Bytes::ZERO, &mut theirs).unwrap();
        rate("read and checked, from the page cache", begun);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn bytes_read_back_however_they_were_written(
        length in prop_oneof![0..3000_usize, ((1 << 20) - 2..(1 << 20) + 3_usize), ((2 << 20) - 2..(2 << 20) + 3_usize)],
        steps in prop::collection::vec(1..900_000_usize, 1..8),
    ) {
        let (_root, tier) = tier();
        let ours = bytes(length);
        let mut draft = tier.create(Bytes::new(length as u64)).unwrap();
        let (mut left, mut steps) = (&ours[..], steps.into_iter().cycle());
        while !left.is_empty() {
            let (part, rest) = left.split_at(steps.next().unwrap().min(left.len()));
            draft.write(part).unwrap();
            left = rest;
        }
        let file = draft.seal().unwrap();
        let mut theirs = vec![0xEE; length];
        file.read(Bytes::ZERO, &mut theirs).unwrap();
        prop_assert!(ours == theirs);
    }
}
