//! Exporters and importers in one process; two processes meet in `tests/share.rs`.

use std::io::Read as _;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use glake_device::Address;
use glake_tiers::{Exported, PoolError, SharedExtent};
use glake_units::Bytes;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
};

use super::handle::Handle;
use super::{Exporter, ShareError, Shared, open};

const BLOCK: Address = Address(0x7000_0000);

/// Pipes stand for extents: each holds its number.
fn exported(count: u64) -> Result<Exported, PoolError> {
    let extent = |number: u64| {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&number.to_le_bytes()).unwrap();
        SharedExtent { fd: reader.into(), size: Bytes::mib(2 + number % 2) }
    };
    let extents = (0..count).map(extent).collect();
    Ok(Exported { base: BLOCK, size: Bytes::mib(count), offset: Bytes::kib(3), extents })
}

fn numbers(opened: Vec<(OwnedFd, Bytes)>) -> Vec<u64> {
    let number = |(number, (fd, size)): (u64, (OwnedFd, Bytes))| {
        assert_eq!(size, Bytes::mib(2 + number % 2));
        let mut bytes = [0; 8];
        std::fs::File::from(fd).read_exact(&mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    };
    (0..).zip(opened).map(number).collect()
}

fn dial(shared: &Shared) -> OwnedFd {
    let name = Handle::decode(&shared.handle).unwrap().name;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect(&socket, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    socket
}

#[test]
fn many_descriptors_arrive_in_order() {
    let exporter = Exporter::new();
    let shared = exporter.share(BLOCK, || exported(260)).unwrap();
    assert_eq!(shared.offset, Bytes::kib(3));
    assert_eq!(numbers(open(&shared.handle).unwrap()), (0..260).collect::<Vec<_>>());
}

#[test]
fn the_same_block_is_the_same_export() {
    let exporter = Exporter::new();
    let first = exporter.share(BLOCK, || exported(2)).unwrap();
    let again = exporter.share(BLOCK, || panic!("asked twice")).unwrap();
    let other = exporter.share(Address(BLOCK.0 + 512), || exported(3)).unwrap();
    assert!(first == again && other.id != first.id && exporter.exports() == 2);
    assert!(exporter.forget(first.id) && !exporter.forget(first.id));
    assert!(matches!(open(&first.handle), Err(ShareError::Forgotten { pid }) if pid == std::process::id()));
    assert_eq!(open(&other.handle).unwrap().len(), 3);
    let anew = exporter.share(BLOCK, || exported(1)).unwrap();
    assert!(anew.id != first.id);
    assert!(exporter.forget_block(BLOCK) && !exporter.forget_block(BLOCK));
    assert!(exporter.forget(other.id) && exporter.exports() == 0);
}

#[test]
fn what_cannot_be_exported_is_not_shared() {
    let exporter = Exporter::new();
    let unknown = || PoolError::UnknownAddress { device: glake_device::DeviceId(0), address: BLOCK };
    let error = exporter.share(BLOCK, || Err(unknown())).unwrap_err();
    assert!(matches!(error, ShareError::Pool(PoolError::UnknownAddress { .. })));
    assert_eq!(exporter.exports(), 0);
}

#[test]
fn without_its_exporter_nothing_is_opened() {
    let exporter = Exporter::new();
    let shared = exporter.share(BLOCK, || exported(1)).unwrap();
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
    let shared = exporter.share(BLOCK, || exported(3)).unwrap();
    let start = Instant::now();
    let mut kept = Vec::new();
    for round in 0..200_usize {
        let client = dial(&shared);
        let garbage = vec![u8::try_from(round).unwrap(); round];
        if round % 2 == 0 && round > 0 {
            // The exporter may have shown it the door already.
            let _ = send(&client, &garbage, SendFlags::NOSIGNAL);
        }
        kept.push(client);
        if round % 50 == 0 {
            assert_eq!(open(&shared.handle).unwrap().len(), 3);
        }
    }
    // One that asks and never reads.
    let silent = dial(&shared);
    let request = super::wire::Request { id: shared.id, from: 0 }.encode();
    while send(&silent, &request, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok() {}
    assert_eq!(numbers(open(&shared.handle).unwrap()), [0, 1, 2]);
    assert!(start.elapsed() < Duration::from_secs(4), "nobody waits for a bad client");
}

#[test]
fn a_forked_child_leaves_its_parents_exporter_alone() {
    let mut parents = Exporter::new();
    let shared = parents.share(BLOCK, || exported(1)).unwrap();
    // As a child sees it: the exporter of another process.
    parents.pid += 1;
    assert!(matches!(parents.share(BLOCK, || exported(1)), Err(ShareError::Forked)));
    assert!(!parents.forget(shared.id) && !parents.forget_block(BLOCK));
    drop(parents);
    assert_eq!(numbers(open(&shared.handle).unwrap()), [0]);
}
