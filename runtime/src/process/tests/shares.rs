//! What ends the sharing of a block.

use super::*;
use crate::share::ShareError;

const POOL: PoolId = PoolId(3, 0);

fn is_forgotten(process: &Process, handle: &[u8]) -> bool {
    match process.sharing().open(handle, 0) {
        Ok(base) => {
            process.sharing().close(base).unwrap();
            false
        }
        Err(ProcessError::Share(ShareError::Forgotten { .. })) => true,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_a_restore_frees_is_shared_no_more() {
    let process = started("");
    process.pools().begin(0, POOL, None).unwrap();
    let malloc = |size| process.malloc(0, size, STREAM).unwrap();
    let (stays, other_shape) = (malloc(mib(40)), malloc(mib(20)));
    let kept = process.sharing().share(stays).unwrap();
    let checkpoint = process.pools().checkpoint(0, POOL).unwrap();
    process.free(other_shape).unwrap();
    assert_eq!(malloc(mib(10)), other_shape, "the same place, and shorter");
    let goes = malloc(mib(60));
    let gone = [goes, other_shape].map(|block| process.sharing().share(block).unwrap());
    process.restore(&checkpoint).unwrap();
    for (handle, _) in &gone {
        assert!(is_forgotten(&process, handle));
    }
    assert!(!is_forgotten(&process, &kept.0));
    assert_eq!(process.sharing().share(stays).unwrap(), kept);
    assert_eq!(process.sharing.exports(), 1);
    let anew = process.sharing().share(other_shape).unwrap();
    assert_ne!(anew.0, gone[1].0);
    assert!(!is_forgotten(&process, &anew.0));
    process.pools().end(0, POOL).unwrap();
    for block in [stays, other_shape] {
        process.free(block).unwrap();
    }
    assert_eq!(process.sharing.exports(), 0);
    process.pools().release(0, POOL).unwrap();
}

/// A restore that is refused ends nothing.
#[test]
fn what_a_restore_leaves_is_shared_as_before() {
    let process = started("");
    process.pools().begin(0, POOL, None).unwrap();
    let block = process.malloc(0, mib(40), STREAM).unwrap();
    let checkpoint = process.pools().checkpoint(0, POOL).unwrap();
    process.free(block).unwrap();
    process.pools().trim(0, POOL).unwrap();
    let other = process.malloc(0, mib(3), STREAM).unwrap();
    let (handle, _) = process.sharing().share(other).unwrap();
    process.restore(&checkpoint).unwrap_err();
    assert!(!is_forgotten(&process, &handle));
    process.pools().end(0, POOL).unwrap();
    process.free(other).unwrap();
    process.pools().release(0, POOL).unwrap();
}
