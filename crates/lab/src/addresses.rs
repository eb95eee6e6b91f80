//! The addresses of a lab. All 10.x addresses are routed to this host, so each lab of a network namespace gets its own
//! /16, and each server and pod its own address: several processes can listen on port 8443.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    sync::atomic::{AtomicU8, AtomicU16, Ordering},
};

use anyhow::{Result, bail};

/// The address range of one lab. The listener is the lock on its number: the kernel closes it when the process exits.
pub(crate) struct AddressRange {
    pub(crate) number: u8,
    next_pod: AtomicU16,
    _lock: TcpListener,
}

/// With a higher number, the second octet of the Service range (100 + number) would be too large.
const MAX_LABS: u8 = 99;
const ETCD_PORT: u16 = 2379;
const FIRST_POD: u16 = 2 << 8;
const LAST_POD: u16 = (250 << 8) + 255;

/// The loopback address of a pod, or of a process with an address. All of them share one network namespace, and every
/// address of 127.0.0.0/8 is loopback.
pub fn loopback(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let [_, second, third, fourth] = address.octets();
            IpAddr::V4(Ipv4Addr::new(127, second, third, fourth))
        }
        IpAddr::V6(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
    }
}

impl AddressRange {
    pub(crate) fn reserve() -> Result<Self> {
        // Numbers are used in turn: the processes of a lab that just ended may still hold their ports.
        static NEXT: AtomicU8 = AtomicU8::new(0);
        for _ in 0..MAX_LABS {
            let number = 1 + NEXT.fetch_add(1, Ordering::Relaxed) % MAX_LABS;
            if let Ok(lock) = TcpListener::bind((Ipv4Addr::new(10, number, 255, 254), 1)) {
                return Ok(AddressRange { number, next_pod: AtomicU16::new(FIRST_POD), _lock: lock });
            }
        }
        bail!(
            "no free address range: {MAX_LABS} labs are running in this network namespace, or it has no route for 10.0.0.0/8"
        )
    }

    fn host(&self, third: u8, fourth: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, self.number, third, fourth))
    }

    pub(crate) fn api_server(&self) -> SocketAddr {
        SocketAddr::new(self.host(0, 1), 6443)
    }

    pub(crate) fn etcd(&self) -> SocketAddr {
        SocketAddr::new(self.host(0, 2), ETCD_PORT)
    }

    pub(crate) fn proxy(&self) -> SocketAddr {
        SocketAddr::new(self.host(0, 3), 6443)
    }

    pub(crate) fn controller_manager(&self) -> IpAddr {
        self.host(0, 4)
    }

    pub(crate) fn scheduler(&self) -> IpAddr {
        self.host(0, 5)
    }

    pub(crate) fn second_api_server(&self) -> SocketAddr {
        SocketAddr::new(self.host(0, 6), 6443)
    }

    /// The proxy of etcd for the second API server.
    pub(crate) fn lagging_etcd(&self) -> SocketAddr {
        SocketAddr::new(self.host(0, 7), ETCD_PORT)
    }

    /// The addresses of operator processes, which listen on fixed ports.
    pub(crate) fn program(&self, number: u8) -> IpAddr {
        self.host(251, number)
    }

    pub(crate) fn node(&self, number: u8) -> IpAddr {
        self.host(1, number)
    }

    pub(crate) fn services(&self) -> String {
        format!("10.{}.0.0/16", 100 + self.number)
    }

    /// The address of the next pod. After about 63,000 pods, addresses are reused.
    pub(crate) fn next_pod(&self) -> IpAddr {
        let next = |value: u16| if value >= LAST_POD { FIRST_POD } else { value + 1 };
        let value = self
            .next_pod
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |value| Some(next(value)))
            .unwrap_or(FIRST_POD);
        let [third, fourth] = value.to_be_bytes();
        self.host(third, fourth)
    }
}

/// Fails if another process already listens on this address.
pub(crate) fn require_free(server: &str, address: SocketAddr) -> Result<()> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(error) => bail!(
            "{server} cannot listen on {address} ({error}): another process in this network namespace uses the port; \
             stop it (`cargo xtask lab down`) or start the lab in its own network namespace"
        ),
    }
}
