//! Handlers of events, called in the order in which they subscribed.

use parking_lot::RwLock;

type Handler<E> = Box<dyn Fn(&E) + Send + Sync>;

/// Subscribe before the source of the events starts: earlier events are not repeated. A handler must not block.
pub struct Subscribers<E>(RwLock<Vec<Handler<E>>>);

impl<E> Default for Subscribers<E> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<E> Subscribers<E> {
    pub fn subscribe(&self, handler: impl Fn(&E) + Send + Sync + 'static) {
        self.0.write().push(Box::new(handler));
    }

    pub fn notify(&self, event: &E) {
        self.0.read().iter().for_each(|handler| handler(event));
    }
}
