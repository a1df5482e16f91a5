//! Exporters and importers in one process; two processes meet in `tests/share.rs`.

use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use glake_device::{Address, DeviceId, Driver, Stream};
use glake_sim::{SimOptions, Simulator};
use glake_tiers::{BlockLife, Exported, GpuPool, PoolError, PoolOptions, PoolStream};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, connect, listen, recv, send, sendmsg, socket_with,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::handle::{BATCH, Handle, MOST_FDS, REQUEST, Reply, Request};
use super::{Exporter, Opened, ShareError, Shared};

const BLOCK: Address = Address(0x7000_0000);

/// Pipes stand for extents: each holds its number.
fn exported(count: usize, part: Range<usize>) -> Result<Exported, PoolError> {
    let descriptors = (0..count).skip(part.start).take(part.len()).map(|number| {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&number.to_le_bytes()).unwrap();
        reader.into()
    });
    Ok(Exported {
        base: BLOCK,
        size: Bytes::mib(count as u64),
        offset: Bytes::kib(3),
        sizes: (0..count).map(size_of_number).collect(),
        descriptors: descriptors.collect(),
        life: BlockLife::default(),
    })
}

fn size_of_number(number: usize) -> Bytes {
    Bytes::mib(2 + number as u64 % 2)
}

/// All extents of a share, their descriptors open at once.
fn open(handle: &[u8]) -> Result<Vec<OwnedFd>, ShareError> {
    let Opened { sizes, mut descriptors } = super::open(handle)?;
    let mut all = Vec::new();
    while all.len() < sizes.len() {
        let batch = descriptors.receive(all.len())?;
        assert!((1..=BATCH).contains(&batch.len()));
        all.extend(batch);
    }
    Ok(all)
}

fn numbers(opened: Vec<OwnedFd>) -> Vec<usize> {
    let number = |descriptor: OwnedFd| {
        let mut bytes = [0; 8];
        std::fs::File::from(descriptor).read_exact(&mut bytes).unwrap();
        usize::from_le_bytes(bytes)
    };
    opened.into_iter().map(number).collect()
}

fn dial(shared: &Shared) -> OwnedFd {
    let name = Handle::decode(&shared.handle).unwrap().name;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect(&socket, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    socket
}

/// A child that this process forks has all that is open here, and would keep the memory by it.
#[test]
fn memory_is_open_only_while_it_is_given_out() {
    let names = Arc::new(Mutex::new(Vec::new()));
    let link = |fd: &str| std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
    let noted = names.clone();
    let export = move |part| {
        let exported = exported(3, part)?;
        let opened = exported.descriptors.iter().map(|descriptor| link(&descriptor.as_raw_fd().to_string()));
        noted.lock().extend(opened);
        Ok(exported)
    };
    let open_here = || {
        let files = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
        let links: Vec<PathBuf> = files.map(|file| link(&file.file_name().to_string_lossy())).collect();
        links.iter().filter(|link| names.lock().contains(link)).count()
    };
    let until = |count: usize| {
        let start = Instant::now();
        while open_here() != count {
            assert!(start.elapsed() < Duration::from_secs(5), "{} are open, not {count}", open_here());
            std::thread::yield_now();
        }
    };
    let exporter = Exporter::new();
    let shared = exporter.share(BLOCK, export).unwrap();
    assert_eq!(names.lock().len(), 1);
    assert_eq!(open_here(), 0, "while nobody opens it");
    let opened = open(&shared.handle).unwrap();
    until(3);
    assert_eq!(numbers(opened), [0, 1, 2]);
    assert_eq!(open_here(), 0, "once the importer has closed its own");
}

#[test]
fn many_descriptors_arrive_in_order_and_few_at_a_time() {
    let exporter = Exporter::new();
    let most = Arc::new(AtomicUsize::new(0));
    let asked = most.clone();
    let shared = exporter.share(BLOCK, move |part| {
        let exported = exported(260, part)?;
        asked.fetch_max(exported.descriptors.len(), Ordering::Relaxed);
        Ok(exported)
    });
    let shared = shared.unwrap();
    assert_eq!(shared.offset, Bytes::kib(3));
    let opened = super::open(&shared.handle).unwrap();
    assert_eq!(opened.sizes, (0..260).map(size_of_number).collect::<Vec<_>>());
    assert_eq!(numbers(open(&shared.handle).unwrap()), (0..260).collect::<Vec<_>>());
    assert_eq!(most.load(Ordering::Relaxed), BATCH);
}

/// Earlier versions send as many as fit a message, and ask for the rest.
#[test]
fn earlier_versions_are_understood() {
    let exporter = Exporter::new();
    let shared = exporter.share(BLOCK, |part| exported(300, part)).unwrap();
    let mut handle = Handle::decode(&shared.handle).unwrap();
    getrandom(&mut handle.name[..], GetRandomFlags::empty()).unwrap();
    let listener =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new_abstract_name(&handle.name).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    let earlier = std::thread::spawn(move || {
        let client = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        let mut bytes = [0; REQUEST];
        while let Ok((length @ 1.., _)) = recv(&client, &mut bytes[..], RecvFlags::empty()) {
            let from = usize::try_from(Request::decode(&bytes[..length]).unwrap().from).unwrap();
            let sent = exported(300, from..from + MOST_FDS).unwrap().descriptors;
            let fds: Vec<_> = sent.iter().map(|descriptor| descriptor.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let reply = Reply::Descriptors(u32::try_from(fds.len()).unwrap()).encode();
            sendmsg(&client, &[IoSlice::new(&reply)], &mut control, SendFlags::empty()).unwrap();
        }
    });
    let Opened { sizes, mut descriptors } = super::open(&handle.encode()).unwrap();
    let first = descriptors.receive(0).unwrap();
    assert_eq!(first.len(), MOST_FDS);
    let rest = descriptors.receive(first.len()).unwrap();
    assert_eq!(numbers(first.into_iter().chain(rest).collect()), (0..sizes.len()).collect::<Vec<_>>());
    drop(descriptors);
    earlier.join().unwrap();
}

/// More than the exporter listens to at a time: each is hung up on, and comes again.
#[test]
fn all_of_many_importers_are_served() {
    let exporter = Exporter::new();
    let shared = exporter.share(BLOCK, |part| exported(40, part)).unwrap();
    let mut opened: Vec<Opened> = (0..100).map(|_| super::open(&shared.handle).unwrap()).collect();
    for from in [0, 13] {
        for importer in &mut opened {
            assert_eq!(numbers(importer.descriptors.receive(from).unwrap())[0], from);
        }
    }
}

#[test]
fn the_same_block_is_the_same_export() {
    let exporter = Exporter::new();
    let first = exporter.share(BLOCK, |part| exported(2, part)).unwrap();
    let again = exporter.share(BLOCK, |_| panic!("asked twice")).unwrap();
    let other = exporter.share(Address(BLOCK.0 + 512), |part| exported(3, part)).unwrap();
    assert!(first == again && other.id != first.id && exporter.exports() == 2);
    assert!(exporter.forget(first.id) && !exporter.forget(first.id));
    assert!(matches!(open(&first.handle), Err(ShareError::Forgotten { pid }) if pid == std::process::id()));
    assert_eq!(open(&other.handle).unwrap().len(), 3);
    let anew = exporter.share(BLOCK, |part| exported(1, part)).unwrap();
    assert!(anew.id != first.id);
    assert!(exporter.forget_block(BLOCK) && !exporter.forget_block(BLOCK));
    assert!(exporter.forget(other.id) && exporter.exports() == 0);
}

#[test]
fn what_cannot_be_exported_is_not_shared() {
    let exporter = Exporter::new();
    let unknown = || PoolError::UnknownAddress { device: glake_device::DeviceId(0), address: BLOCK };
    let error = exporter.share(BLOCK, move |_| Err(unknown())).unwrap_err();
    assert!(matches!(error, ShareError::Pool(PoolError::UnknownAddress { .. })));
    assert_eq!(exporter.exports(), 0);
}

/// Another thread frees the block while its memory is asked for, before or after its sharing is forgotten.
#[test]
fn a_block_that_is_freed_while_it_is_shared_is_not_shared() {
    let driver: Arc<dyn Driver> = Arc::new(Simulator::new(SimOptions::default()).unwrap());
    let options = PoolOptions { exportable: true, ..PoolOptions::default() };
    let pool = Arc::new(GpuPool::new(driver.clone(), DeviceId(0), options).unwrap());
    let stream = PoolStream::of(&*driver, DeviceId(0), Stream::LEGACY).unwrap();
    let exporter = Arc::new(Exporter::new());
    let block = pool.malloc(Bytes::mib(20), stream).unwrap().address;
    let export = {
        let pool = pool.clone();
        move |part| pool.export(block, part)
    };
    let freed_meanwhile = {
        let (pool, exporter) = (pool.clone(), exporter.clone());
        move |part| {
            let exported = pool.export(block, part);
            exporter.forget_block(block);
            pool.free(block).unwrap();
            exported
        }
    };
    let shared = exporter.share(block, freed_meanwhile);
    assert!(matches!(shared, Err(ShareError::Freed { .. })), "{shared:?}");
    // Shared between what a free forgets and the free itself.
    assert_eq!(pool.malloc(Bytes::mib(20), stream).unwrap().address, block);
    let early = exporter.share(block, export.clone()).unwrap();
    pool.free(block).unwrap();
    assert!(matches!(open(&early.handle), Err(ShareError::Forgotten { .. })));
    assert_eq!(pool.malloc(Bytes::mib(20), stream).unwrap().address, block);
    let late = exporter.share(block, export.clone()).unwrap();
    assert_ne!(late.id, early.id);
    assert!(open(&late.handle).is_ok() && open(&early.handle).is_err());
    assert_eq!(exporter.exports(), 1);
}

#[test]
fn what_cannot_be_given_out_any_more_is_told() {
    let exporter = Exporter::new();
    const GPU: glake_device::DeviceId = glake_device::DeviceId(0);
    let once = |then: fn() -> PoolError| {
        let first = AtomicBool::new(true);
        move |part| if first.swap(false, Ordering::Relaxed) { exported(1, part) } else { Err(then()) }
    };
    let evicted = once(|| PoolError::Evicted { device: GPU, address: BLOCK });
    let shared = exporter.share(BLOCK, evicted).unwrap();
    assert!(matches!(open(&shared.handle), Err(ShareError::NotGiven { .. })));
    let freed = once(|| PoolError::UnknownAddress { device: GPU, address: BLOCK });
    let shared = exporter.share(Address(1), freed).unwrap();
    assert!(matches!(open(&shared.handle), Err(ShareError::Forgotten { .. })));
}

#[test]
fn without_its_exporter_nothing_is_opened() {
    let exporter = Exporter::new();
    let shared = exporter.share(BLOCK, |part| exported(1, part)).unwrap();
    drop(exporter);
    assert!(matches!(open(&shared.handle), Err(ShareError::Gone { .. })));
    let mut handle = Handle::decode(&shared.handle).unwrap();
    handle.started += 1;
    let error = open(&handle.encode()).unwrap_err();
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
}

#[test]
fn bad_clients_do_no_harm() {
    let exporter = Exporter::new();
    let shared = exporter.share(BLOCK, |part| exported(3, part)).unwrap();
    let start = Instant::now();
    let mut kept = Vec::new();
    for round in 0..200_usize {
        let client = dial(&shared);
        let garbage = vec![u8::try_from(round).unwrap(); round];
        if round % 2 == 0 && round > 0 {
            // The exporter may have closed its connection already.
            let _ = send(&client, &garbage, SendFlags::NOSIGNAL);
        }
        kept.push(client);
        if round % 50 == 0 {
            assert_eq!(open(&shared.handle).unwrap().len(), 3);
        }
    }
    // One that asks and never reads.
    let silent = dial(&shared);
    let request = Request { id: shared.id, from: 0 }.encode();
    while send(&silent, &request, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok() {}
    assert_eq!(numbers(open(&shared.handle).unwrap()), [0, 1, 2]);
    assert!(start.elapsed() < Duration::from_secs(4), "nobody waits for a bad client");
}

#[test]
fn a_forked_child_leaves_its_parents_exporter_alone() {
    let mut parents = Exporter::new();
    let shared = parents.share(BLOCK, |part| exported(1, part)).unwrap();
    // As a child sees it: the exporter of another process.
    parents.pid += 1;
    assert!(matches!(parents.share(BLOCK, |part| exported(1, part)), Err(ShareError::Forked)));
    assert!(!parents.forget(shared.id) && !parents.forget_block(BLOCK));
    drop(parents);
    assert_eq!(numbers(open(&shared.handle).unwrap()), [0]);
}
