//! The two netlink requests that set up a new network namespace: they bring `lo` up and route all of 10.0.0.0/8 to this
//! host. The kernel then refuses connections to unused addresses of that range instead of routing them elsewhere.
//!
//! Two fixed messages do not justify a netlink crate, and not every machine has the program `ip`.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket};

/// `lo` is the first device of every network namespace.
const LOOPBACK: u32 = 1;

// Constants of rtnetlink(7).
const RTM_NEWLINK: u16 = 16;
const RTM_NEWROUTE: u16 = 24;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const IFF_UP: u32 = 0x1;
const AF_INET: u8 = 2;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_BOOT: u8 = 3;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;

pub(crate) fn bring_up_loopback_with_local_route() -> Result<()> {
    request(RTM_NEWLINK, 0, &link_up()).context("bringing lo up")?;
    request(RTM_NEWROUTE, NLM_F_CREATE, &local_route([10, 0, 0, 0], 8)).context("routing 10.0.0.0/8 to this host")
}

/// struct ifinfomsg: family, padding, type, index, flags, change mask.
fn link_up() -> Vec<u8> {
    let mut body = vec![0; 4];
    body.extend(LOOPBACK.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body
}

/// struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags; then two attributes.
fn local_route(network: [u8; 4], prefix: u8) -> Vec<u8> {
    let mut body = vec![AF_INET, prefix, 0, 0, RT_TABLE_LOCAL, RTPROT_BOOT, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0];
    for (kind, value) in [(RTA_DST, network), (RTA_OIF, LOOPBACK.to_ne_bytes())] {
        body.extend(8u16.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(value);
    }
    body
}

fn request(kind: u16, flags: u16, body: &[u8]) -> Result<()> {
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)
        .context("opening a netlink socket")?;
    let length = u32::try_from(16 + body.len()).context("netlink message too long")?;
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    sendto(socket.as_raw_fd(), &message, &NetlinkAddr::new(0, 0), MsgFlags::empty()).context("sending")?;

    let mut response = [0u8; 4096];
    let received = recv(socket.as_raw_fd(), &mut response, MsgFlags::empty()).context("receiving")?;
    let response = response.get(..received).unwrap_or_default();
    let (Some(kind), Some(code)) = (response.get(4..6), response.get(16..20)) else {
        bail!("the netlink response is too short")
    };
    let (mut kind_bytes, mut code_bytes) = ([0; 2], [0; 4]);
    kind_bytes.copy_from_slice(kind);
    code_bytes.copy_from_slice(code);
    match (u16::from_ne_bytes(kind_bytes), i32::from_ne_bytes(code_bytes)) {
        (NLMSG_ERROR, 0) => Ok(()),
        (NLMSG_ERROR, code) => Err(std::io::Error::from_raw_os_error(-code)).context("the kernel rejected the request"),
        (kind, _) => bail!("unexpected netlink response of type {kind}"),
    }
}
