//! Bounds the bytes of a page of a list.
//!
//! A page is in memory as a whole, once as text and once parsed, and tenants choose how large their objects are. A page
//! above [`MAX_PAGE_BYTES`] is not read to its end. The next request for the same path asks for a quarter of the
//! objects, and so on down to one object, whose size the API server limits.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use http::Uri;
use http_body::Body as HttpBody;
use http_body_util::{BodyExt, LengthLimitError, Limited, combinators::UnsyncBoxBody};
use parking_lot::Mutex;
use tower::BoxError;

use crate::verb::{parameter, with_parameter};

pub(super) const MAX_PAGE_BYTES: usize = 8 * 1024 * 1024;
const DIVISOR: u32 = 4;
const LIMIT: &str = "limit";

/// A page of a list was not read to its end.
#[derive(Debug, thiserror::Error)]
#[error("{objects} objects in one page have more than {MAX_PAGE_BYTES} bytes; the next request asks for fewer")]
pub(crate) struct PageTooLarge {
    objects: u32,
}

/// The number of objects per page, for each path of which a page was too large.
#[derive(Default)]
pub(crate) struct PageLimits(Mutex<HashMap<String, u32>>);

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
        let allowed = limits.0.lock().get(&path).copied();
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
            self.limits.0.lock().insert(self.path.clone(), (self.objects / DIVISOR).max(1));
            PageTooLarge { objects: self.objects }.into()
        };
        Limited::new(body, MAX_PAGE_BYTES).map_err(reduce).boxed_unsync()
    }
}
