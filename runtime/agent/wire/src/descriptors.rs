//! Bytes and file descriptors over a Unix stream. No call blocks.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Maximum number of descriptors received with one read; the kernel closes the others.
const MOST: usize = 4;

/// Sends as many bytes as fit now, and a descriptor with the first byte. Returns the number of bytes sent.
///
/// # Errors
/// The error of `sendmsg`; [`Errno::AGAIN`]: nothing fits now.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

/// Receives the bytes that have arrived, and the first descriptor sent with them; other descriptors are closed. 0 bytes: the other end has
/// closed.
///
/// # Errors
/// The error of `recvmsg`; [`Errno::AGAIN`]: nothing has arrived.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    // Take all descriptors, so that those after the first are closed.
    let descriptors: Vec<OwnedFd> = rights.flatten().collect();
    Ok((received.bytes, descriptors.into_iter().next()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{Activity, ActivityPage, ActivityView};

    #[test]
    fn a_page_comes_with_the_bytes() {
        let (here, there) = UnixStream::pair().unwrap();
        let page = ActivityPage::new().unwrap();
        let mut bytes = [0; 16];
        assert_eq!(receive(&there, &mut bytes).unwrap_err(), Errno::AGAIN);
        assert_eq!(send(&here, b"hello", Some(page.as_fd())).unwrap(), 5);
        let (length, descriptor) = receive(&there, &mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"hello");
        let view = ActivityView::new(descriptor.unwrap()).unwrap();
        page.write(Activity { uses: 3, ..Activity::default() }).unwrap();
        assert_eq!(view.read().unwrap().uses, 3);
        send(&here, b"more", None).unwrap();
        assert!(receive(&there, &mut bytes).unwrap().1.is_none());
        drop(here);
        assert_eq!(receive(&there, &mut bytes).unwrap().0, 0);
    }
}
