//! What ends the sharing of a block.

use super::*;
use crate::share::ShareError;

const POOL: PoolId = PoolId(3, 0);

fn is_forgotten(process: &Process, handle: &[u8]) -> bool {
    match process.open_shared(handle, 0) {
        Ok(base) => {
            process.close_shared(base).unwrap();
            false
        }
        Err(ProcessError::Share(ShareError::Forgotten { .. })) => true,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_a_restore_frees_is_shared_no_more() {
    let process = started("");
    process.begin_pool(0, POOL, None).unwrap();
    let malloc = |size| process.malloc(0, size, STREAM).unwrap();
    let (stays, other_shape) = (malloc(mib(40)), malloc(mib(20)));
    let kept = process.share(stays).unwrap();
    let checkpoint = process.checkpoint(0, POOL).unwrap();
    process.free(other_shape).unwrap();
    assert_eq!(malloc(mib(10)), other_shape, "the same place, and shorter");
    let goes = malloc(mib(60));
    let gone = [goes, other_shape].map(|block| process.share(block).unwrap());
    process.restore(&checkpoint).unwrap();
    for (handle, _) in &gone {
        assert!(is_forgotten(&process, handle));
    }
    assert!(!is_forgotten(&process, &kept.0));
    assert_eq!(process.share(stays).unwrap(), kept);
    assert_eq!(process.exporter.exports(), 1);
    let anew = process.share(other_shape).unwrap();
    assert_ne!(anew.0, gone[1].0);
    assert!(!is_forgotten(&process, &anew.0));
    process.end_pool(0, POOL).unwrap();
    for block in [stays, other_shape] {
        process.free(block).unwrap();
    }
    assert_eq!(process.exporter.exports(), 0);
    process.release_pool(0, POOL).unwrap();
}

/// A restore that is refused ends nothing.
#[test]
fn what_a_restore_leaves_is_shared_as_before() {
    let process = started("");
    process.begin_pool(0, POOL, None).unwrap();
    let block = process.malloc(0, mib(40), STREAM).unwrap();
    let checkpoint = process.checkpoint(0, POOL).unwrap();
    process.free(block).unwrap();
    process.trim_pool(0, POOL).unwrap();
    let other = process.malloc(0, mib(3), STREAM).unwrap();
    let (handle, _) = process.share(other).unwrap();
    process.restore(&checkpoint).unwrap_err();
    assert!(!is_forgotten(&process, &handle));
    process.end_pool(0, POOL).unwrap();
    process.free(other).unwrap();
    process.release_pool(0, POOL).unwrap();
}
