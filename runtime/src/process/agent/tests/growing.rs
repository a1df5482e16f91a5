//! What a worker says of its memory while it grows, and while its uses change what is live in it.

use super::*;

/// What it says that it holds, once it is so.
fn told(agent: &mut Agent, what: &str, is: impl Fn(&Holding) -> bool) -> Holding {
    agent.hear_until(what, |said| match said {
        ToAgent::Changed { holdings } => holdings.first().filter(|held| is(held)).cloned(),
        _ => None,
    })
}

#[test]
fn growth_is_told_with_what_would_be_copied() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    agent.grant(mib(64));
    until("the grant", || process.lease().filter(|lease| *lease == mib(76)));
    // The region of the first block: no other one begins.
    process.regions().enter("weights").unwrap();
    let more: Vec<_> = (0..6).map(|_| process.malloc(0, mib(4), STREAM).unwrap()).collect();
    process.regions().leave().unwrap();
    let held = told(&mut agent, "growth", |held| held.resident == mib(36) && held.dirty == mib(36));
    assert_eq!((held.unused, held.evicted), (Some(mib(0)), mib(0)));
    more.into_iter().for_each(|block| process.free(block).unwrap());
    process.free(block).unwrap();
    process.agent().leave();
}

#[test]
fn what_uses_change_is_told_when_they_have_ended() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    agent.grant(mib(64));
    until("the grant", || process.lease().filter(|lease| *lease == mib(76)));
    process.regions().enter("weights").unwrap();
    let more = process.malloc(0, mib(24), STREAM).unwrap();
    process.regions().leave().unwrap();
    told(&mut agent, "growth", |held| held.dirty == mib(36));
    // Nothing is made nor released.
    process.free(more).unwrap();
    use_all(&process).unwrap();
    let held = told(&mut agent, "what is free", |held| held.as_of == Some(1) && held.unused == Some(mib(24)));
    assert_eq!((held.resident, held.dirty), (mib(36), mib(12)));
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, Some(LONG)).unwrap();
    process.regions().enter("weights").unwrap();
    let again = process.malloc(0, mib(24), STREAM).unwrap();
    process.regions().leave().unwrap();
    process.regions().gate().end_use(id).unwrap();
    let held = told(&mut agent, "what is live again", |held| held.dirty == mib(36));
    assert_eq!((held.resident, held.as_of), (mib(36), Some(2)));
    [block, again].into_iter().for_each(|block| process.free(block).unwrap());
    process.agent().leave();
}
