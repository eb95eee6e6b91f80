//! Who has which address. Every 10.x address is this host, so each lab of a namespace gets a /16 of its own and each
//! server and pod an address of its own: several processes can all listen on 8443.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    sync::atomic::{AtomicU8, AtomicU16, Ordering},
};

use anyhow::{Result, bail};

/// Held for the lab's life: the listener is the lock on its number, and the kernel drops it with the process.
pub(crate) struct AddressRange {
    pub(crate) number: u8,
    next_pod: AtomicU16,
    _lock: TcpListener,
}

/// Beyond this the Service ranges (100 + number) would leave 10.0.0.0/8's second octet.
const MOST_LABS: u8 = 99;
const FIRST_POD: u16 = 2 << 8;
const LAST_POD: u16 = (250 << 8) + 255;

impl AddressRange {
    pub(crate) fn reserve() -> Result<Self> {
        // In turn: the processes of a lab that just ended may need a moment to give their ports back.
        static NEXT: AtomicU8 = AtomicU8::new(0);
        for _ in 0..MOST_LABS {
            let number = 1 + NEXT.fetch_add(1, Ordering::Relaxed) % MOST_LABS;
            if let Ok(lock) = TcpListener::bind((Ipv4Addr::new(10, number, 255, 254), 1)) {
                return Ok(AddressRange { number, next_pod: AtomicU16::new(FIRST_POD), _lock: lock });
            }
        }
        bail!("{MOST_LABS} labs already run in this network namespace, or it has no route for 10.0.0.0/8")
    }

    fn host(&self, third: u8, fourth: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, self.number, third, fourth))
    }

    pub(crate) fn api_server(&self) -> SocketAddr {
        SocketAddr::new(self.host(0, 1), 6443)
    }

    pub(crate) fn etcd(&self) -> IpAddr {
        self.host(0, 2)
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

    /// Addresses for the programs under test, which listen on fixed ports.
    pub(crate) fn program(&self, number: u8) -> IpAddr {
        self.host(251, number)
    }

    pub(crate) fn node(&self, number: u8) -> IpAddr {
        self.host(1, number)
    }

    pub(crate) fn services(&self) -> String {
        format!("10.{}.0.0/16", 100 + self.number)
    }

    /// A pod's address. They are handed out in turn; a lab that makes 63,000 pods starts over.
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

/// Fails with a sentence if something already listens where a server is about to.
pub(crate) fn require_free(what: &str, address: SocketAddr) -> Result<()> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(error) => bail!(
            "{what} cannot listen on {address} ({error}): another process of this namespace uses the port; \
             end it (`cargo xtask lab down`) or start the lab in a namespace of its own"
        ),
    }
}
