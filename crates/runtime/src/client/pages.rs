//! Bounds the bytes of a page of a list.
//!
//! A page is in memory as a whole, once as text and once parsed, and tenants choose how large their objects are. A page
//! above [`MAX_PAGE_BYTES`] is not read to its end. The next request for the same path asks for a quarter of the
//! objects, and so on down to one object, whose size the API server limits. After [`RECOVERY`], a list begins with the
//! size that was asked for again: the large objects may be gone.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use http::Uri;
use http_body::Body as HttpBody;
use http_body_util::{BodyExt, LengthLimitError, Limited, combinators::UnsyncBoxBody};
use parking_lot::Mutex;
use tokio::time::Instant;
use tower::BoxError;

use crate::verb::{parameter, with_parameter};

pub(super) const MAX_PAGE_BYTES: usize = 8 * 1024 * 1024;
const DIVISOR: u32 = 4;
const LIMIT: &str = "limit";
const CONTINUE: &str = "continue";
const RECOVERY: Duration = Duration::from_secs(600);

/// A page of a list was not read to its end.
#[derive(Debug, thiserror::Error)]
#[error("{objects} objects in one page have more than {MAX_PAGE_BYTES} bytes; the next request asks for fewer")]
pub(crate) struct PageTooLarge {
    objects: u32,
}

/// The number of objects per page, for each path of which a page was too large, and when that was.
#[derive(Default)]
pub(crate) struct PageLimits(Mutex<HashMap<String, (u32, Instant)>>);

impl PageLimits {
    /// The pages of one list have the same size.
    fn of(&self, path: &str, begins_list: bool) -> Option<u32> {
        let mut limits = self.0.lock();
        if begins_list && limits.get(path).is_some_and(|(_, at)| at.elapsed() >= RECOVERY) {
            limits.remove(path);
        }
        limits.get(path).map(|(objects, _)| *objects)
    }

    fn reduce(&self, path: &str, objects: u32) {
        self.0.lock().insert(path.to_owned(), ((objects / DIVISOR).max(1), Instant::now()));
    }
}

/// A request for a page of a list.
pub(super) struct ListPage {
    limits: Arc<PageLimits>,
    path: String,
    objects: u32,
}

impl ListPage {
    /// `None` for a request without `limit`.
    pub(super) fn of(uri: &Uri, limits: &Arc<PageLimits>) -> Option<Self> {
        let asked_for = parameter(uri, LIMIT)?.parse().ok()?;
        let path = uri.path().to_owned();
        let allowed = limits.of(&path, parameter(uri, CONTINUE).is_none());
        Some(Self {
            limits: limits.clone(),
            objects: allowed.map_or(asked_for, |allowed| allowed.min(asked_for)),
            path,
        })
    }

    /// The address with the number of objects that this page may have.
    pub(super) fn uri(&self, uri: &Uri) -> Uri {
        with_parameter(uri, LIMIT, &self.objects.to_string())
    }

    /// The body of the response, which fails when it is too large.
    pub(super) fn bound<B>(self, body: B) -> UnsyncBoxBody<Bytes, BoxError>
    where
        B: HttpBody<Data = Bytes, Error = BoxError> + Send + 'static,
    {
        if self.objects <= 1 {
            return body.boxed_unsync();
        }
        let reduce = move |error: BoxError| {
            if !error.is::<LengthLimitError>() {
                return error;
            }
            self.limits.reduce(&self.path, self.objects);
            PageTooLarge { objects: self.objects }.into()
        };
        Limited::new(body, MAX_PAGE_BYTES).map_err(reduce).boxed_unsync()
    }
}
