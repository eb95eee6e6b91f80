//! The open connections of a server. When there are too many, a new one replaces one that is idle, so that clients that
//! only keep connections open cannot keep others out.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

#[derive(Clone)]
pub(super) struct Connections(Arc<Mutex<Open>>);

struct Open {
    limit: usize,
    /// By serial number. A connection gets a new one when it becomes idle, so the first idle one is idle the longest.
    connections: BTreeMap<u64, Connection>,
    serial: u64,
}

struct Connection {
    peer: IpAddr,
    /// No request is in progress.
    idle: bool,
    close: CancellationToken,
}

/// One open connection. Dropping it frees its place.
pub(super) struct Place {
    connections: Connections,
    serial: Mutex<u64>,
    /// The server must close the connection.
    pub(super) close: CancellationToken,
}

impl Connections {
    pub(super) fn new(limit: usize) -> Self {
        Self(Arc::new(Mutex::new(Open { limit, connections: BTreeMap::new(), serial: 0 })))
    }

    /// A place for a new connection. If there is none, the connection that has been idle for the longest time is closed,
    /// of the address that has most connections. None: every connection has a request in progress.
    pub(super) fn add(&self, peer: IpAddr) -> Option<Place> {
        let mut open = self.0.lock();
        if open.connections.len() >= open.limit {
            let serial = open.longest_idle()?;
            let closed = open.connections.remove(&serial)?;
            closed.close.cancel();
        }
        let close = CancellationToken::new();
        let serial = open.insert(Connection { peer, idle: true, close: close.clone() });
        Some(Place { connections: self.clone(), serial: Mutex::new(serial), close })
    }
}

impl Open {
    fn insert(&mut self, connection: Connection) -> u64 {
        self.serial += 1;
        self.connections.insert(self.serial, connection);
        self.serial
    }

    fn longest_idle(&self) -> Option<u64> {
        let mut by_peer: HashMap<IpAddr, usize> = HashMap::new();
        for connection in self.connections.values() {
            *by_peer.entry(connection.peer).or_default() += 1;
        }
        let count = |connection: &Connection| by_peer.get(&connection.peer).copied().unwrap_or_default();
        let idle = self.connections.iter().filter(|(_, connection)| connection.idle);
        idle.min_by_key(|(serial, connection)| (usize::MAX - count(connection), **serial)).map(|(serial, _)| *serial)
    }
}

impl Place {
    pub(super) fn set_idle(&self, idle: bool) {
        let (mut open, mut serial) = (self.connections.0.lock(), self.serial.lock());
        if let Some(connection) = open.connections.remove(&serial) {
            *serial = open.insert(Connection { idle, ..connection });
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.0.lock().connections.remove(&self.serial.lock());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn the_longest_idle_connection_of_the_greediest_address_is_closed() {
        let connections = Connections::new(4);
        let other = connections.add(address(1)).unwrap();
        let flood: Vec<_> = (0..3).filter_map(|_| connections.add(address(2))).collect();
        flood[0].set_idle(false);
        flood[0].set_idle(true);
        let new = connections.add(address(3)).unwrap();
        let closed: Vec<bool> = flood.iter().map(|place| place.close.is_cancelled()).collect();
        assert_eq!(closed, [false, true, false], "the first one was in use later than the second");
        assert!(!other.close.is_cancelled() && !new.close.is_cancelled());
    }

    #[test]
    fn a_connection_with_a_request_is_not_closed() {
        let connections = Connections::new(1);
        let busy = connections.add(address(1)).unwrap();
        busy.set_idle(false);
        assert!(connections.add(address(2)).is_none() && !busy.close.is_cancelled());
        drop(busy);
        assert!(connections.add(address(2)).is_some());
    }
}
