//! What is granted is not always enough: others take of it meanwhile, and more is asked for.

use super::*;
use crate::process::Shrink;

/// Hears what comes until something is over; what is wanted or grown by is granted as `grant` says.
fn serve_until(agent: &mut Agent, is_over: impl Fn() -> bool, grant: impl Fn(&ToAgent) -> Option<Bytes>) {
    while !is_over() {
        match agent.hear_now() {
            Some(said) => grant(&said).into_iter().for_each(|bytes| agent.grant(bytes)),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

#[test]
fn growth_is_asked_for_anew_where_another_thread_took_some() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "lease.grow_timeout_ms = 4000");
    agent.grant(mib(24));
    until("the grant", || (process.lease() == Some(mib(36))).then_some(()));
    let grown = std::thread::scope(|scope| {
        let grows = scope.spawn(|| process.malloc(0, mib(32), STREAM));
        let asked = agent.hear_until("grow", |said| match said {
            ToAgent::Grow { bytes, .. } => Some(*bytes),
            _ => None,
        });
        // Meanwhile, on another thread, within the lease.
        let small = process.malloc(0, mib(2), STREAM).unwrap();
        agent.grant(asked);
        serve_until(
            &mut agent,
            || grows.is_finished(),
            |said| match said {
                ToAgent::Grow { bytes, .. } => Some(*bytes),
                _ => None,
            },
        );
        process.free(small).unwrap();
        grows.join().unwrap().map_err(|error| error.to_string())
    });
    process.agent().leave();
    process.free(block).unwrap();
    grown.unwrap();
}

#[test]
fn a_refill_asks_anew_where_another_thread_took_its_room() {
    let (socket, size) = (Socket::new(), mib(768));
    let process = worker("lease = { growth = 0, grow_timeout_ms = 20000, refill_timeout_ms = 20000 }", &[]);
    let block = process.block("weights", size);
    let mut agent = join(&process, &socket);
    agent.shrink(size);
    agent.shrunk();
    // Room for all of it is leased, as after a trim: it is not said that it is wanted.
    agent.grant(size);
    until("the grant", || (process.lease() == Some(size)).then_some(()));
    let refilled = std::thread::scope(|scope| {
        let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
        until("the first extent", || (process.leases().view(0).unwrap().made > mib(0)).then_some(()));
        // The refill can end first: then the allocation asks for growth.
        let other = scope.spawn(|| process.malloc(0, mib(32), STREAM));
        let wanted =
            |said: &ToAgent| matches!(said, ToAgent::Want { .. } | ToAgent::Grow { .. }).then_some(size);
        serve_until(&mut agent, || refill.is_finished() && other.is_finished(), wanted);
        process.free(other.join().unwrap().unwrap()).unwrap();
        refill.join().unwrap().map(|_| ()).map_err(|error| error.to_string())
    });
    process.agent().leave();
    process.free(block).unwrap();
    assert_eq!(refilled, Ok(()), "it asked for nothing");
}

#[test]
fn a_refill_that_is_under_way_at_a_join_asks_for_the_rest() {
    let (socket, size) = (Socket::new(), mib(1024));
    let process = worker("lease = { growth = 0, grow_timeout_ms = 20000, refill_timeout_ms = 20000 }", &[]);
    let block = process.block("weights", size);
    process.regions().shrink(&Shrink::default()).unwrap();
    let refilled = std::thread::scope(|scope| {
        let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
        until("the first extent", || (process.leases().view(0).unwrap().made > mib(0)).then_some(()));
        let mut agent = join(&process, &socket);
        let wanted =
            |said: &ToAgent| matches!(said, ToAgent::Want { .. } | ToAgent::Grow { .. }).then_some(size);
        serve_until(&mut agent, || refill.is_finished(), wanted);
        refill.join().unwrap().map(|_| ()).map_err(|error| error.to_string())
    });
    process.agent().leave();
    process.free(block).unwrap();
    assert_eq!(refilled, Ok(()), "it asked for nothing");
}

#[test]
fn two_regions_come_back_where_there_is_no_agent() {
    let mut socket = Socket::new();
    let process =
        worker("lease = { growth = \"4MiB\", grow_timeout_ms = 2000, refill_timeout_ms = 25000 }", &[]);
    let blocks = [process.block("a", mib(32)), process.block("b", mib(32))];
    let mut agent = join(&process, &socket);
    agent.shrink(mib(64));
    agent.shrunk();
    drop(agent);
    socket.close();
    let begin = Instant::now();
    let ended = std::thread::scope(|scope| {
        let uses = ["a", "b"].map(|tag| {
            let process = &process;
            scope.spawn(move || {
                let id = process.regions().begin_use(&Tags::of(&[tag]), WhenClosed::Refill, None);
                let used = id.map(|id| process.regions().gate().end_use(id).unwrap());
                (tag, begin.elapsed(), used.map_err(|error| error.to_string()))
            })
        });
        uses.map(|one| one.join().unwrap())
    });
    process.agent().leave();
    process.regions().refill(&Refill::default()).unwrap();
    blocks.into_iter().for_each(|block| process.free(block).unwrap());
    assert!(ended.iter().all(|(.., used)| used.is_ok()), "{ended:#?}");
}

#[test]
fn a_want_that_is_denied_denies_no_growth() {
    let socket = Socket::new();
    let process = worker("lease.growth = 0", &[]);
    let blocks = [process.block("cold", mib(12)), process.block("hot", mib(4))];
    let mut agent = join(&process, &socket);
    let cold = || Some(vec!["cold".to_owned()]);
    process.regions().shrink(&Shrink { tags: cold(), ..Shrink::default() }).unwrap();
    let id = process.regions().begin_use(&Tags::of(&["hot"]), WhenClosed::Refuse, None).unwrap();
    let grown = std::thread::scope(|scope| {
        let refill = scope.spawn(|| process.regions().refill(&Refill { tags: cold(), ..Refill::default() }));
        agent.wanted();
        let grows = scope.spawn(|| process.malloc(0, mib(16), STREAM));
        agent.hear_until("grow", |said| matches!(said, ToAgent::Grow { .. }).then_some(()));
        agent.say(ToWorker::Deny {
            why: glake_wire::Denied::TooLarge,
            retry_after_ms: None,
            gpus: Vec::new(),
        });
        std::thread::sleep(Duration::from_millis(300));
        agent.grant(mib(16));
        refill.join().unwrap().unwrap_err();
        grows.join().unwrap().map_err(|error| error.to_string())
    });
    process.regions().gate().end_use(id).unwrap();
    process.agent().leave();
    process.regions().refill(&Refill::default()).unwrap();
    blocks.into_iter().for_each(|block| process.free(block).unwrap());
    process.free(grown.unwrap()).unwrap();
}

/// A race that is lost about every second time: tried often.
#[test]
fn what_a_stopped_refill_gives_back_is_in_nobodys_use() {
    let process = worker("lease = { growth = 0, grow_timeout_ms = 300, refill_timeout_ms = 300 }", &[]);
    let (size, ms) = (mib(64), Duration::from_millis);
    let block = process.block("weights", size);
    process.leases().watch(Some(Arc::new(|_, _, _| ())));
    process.leases().set(0, Some(size)).unwrap();
    let regions = process.regions();
    let evicted = || regions.views().unwrap().iter().map(|view| view.evicted).sum::<Bytes>();
    let round = || {
        regions.shrink(&Shrink::default()).unwrap();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| regions.refill(&Refill::default()));
            std::thread::sleep(ms(20));
            process.leases().grant(0, mib(32)).unwrap();
            let granted = Instant::now();
            until("some of it", || (process.leases().view(0).unwrap().made == mib(32)).then_some(()));
            std::thread::sleep(ms(150));
            // Waits for the turn of the first one.
            let second = scope.spawn(|| regions.refill(&Refill::default()));
            // A use begins as soon as the gate is open, and sees how much of its memory is evicted.
            let used = scope.spawn(|| {
                let begin = |()| regions.begin_use(&Tags::of(&["weights"]), WhenClosed::Refuse, None).ok();
                let begun = Instant::now();
                let id = loop {
                    match begin(()) {
                        Some(id) => break id,
                        None if begun.elapsed() > ms(800) => return mib(0),
                        None => std::thread::yield_now(),
                    }
                };
                let (begun, mut most) = (Instant::now(), mib(0));
                while begun.elapsed() < ms(100) {
                    most = most.max(evicted());
                }
                regions.gate().end_use(id).unwrap();
                most
            });
            // Nothing came for 300 ms: the first refill has stopped. Now all of it is granted.
            std::thread::sleep((granted + ms(340)).saturating_duration_since(Instant::now()));
            process.leases().grant(0, size).unwrap();
            let _ = (first.join().unwrap(), second.join().unwrap());
            used.join().unwrap()
        })
    };
    let seen = (0..20).map(|_| round()).find(|seen| !seen.is_zero());
    process.leases().set(0, None).unwrap();
    regions.refill(&Refill::default()).unwrap();
    process.free(block).unwrap();
    assert_eq!(seen, None, "was evicted while a use of it ran");
}

#[test]
fn threads_that_grow_ask_for_what_they_need() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "lease.grow_timeout_ms = 4000\nlease.growth = 0");
    let threads = 6;
    let (asked, granted) = std::thread::scope(|scope| {
        let grows: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| process.malloc(0, mib(32), STREAM))).collect();
        let mut pending = std::collections::VecDeque::new();
        let (mut asked, mut granted) = (mib(0), mib(0));
        let mut next = Instant::now() + Duration::from_millis(200);
        while !grows.iter().all(|grows| grows.is_finished()) || !pending.is_empty() {
            match agent.hear_now() {
                Some(ToAgent::Grow { bytes, .. }) => {
                    asked = asked.saturating_add(bytes);
                    pending.push_back(bytes);
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            // As victims give, one after the other.
            if Instant::now() >= next
                && let Some(bytes) = pending.pop_front()
            {
                next = Instant::now() + Duration::from_millis(50);
                agent.grant(bytes);
                granted = granted.saturating_add(bytes);
            }
        }
        for grows in grows {
            process.free(grows.join().unwrap().unwrap()).unwrap();
        }
        (asked, granted)
    });
    process.agent().leave();
    process.free(block).unwrap();
    assert!(granted <= mib(32 * threads), "asked {asked}, granted {granted}, needed {}", mib(32 * threads));
}
