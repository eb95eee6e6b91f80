//! Lists the objects that are stored again before an upgrade, page by page (`vitivirt_install::next_migration`). The place
//! in the list is only in memory: after a restart the operator begins again, and the API server writes nothing for an
//! object that is already stored in the present version.

use kube::{Api, Client, api::ListParams, core::DynamicObject};
use parking_lot::Mutex;
use vitivirt_api::{Failure, ObjectKey, Outcome, Stop, Target};
use vitivirt_install::{Observed, STORAGE_WAIT, StoragePage, next_migration};
use vitivirt_runtime::reconcile::classify;

/// The objects of one reconcile.
const PAGE: u32 = 100;
const EXPIRED: u16 = 410;

#[derive(Default)]
pub(crate) struct StoragePages(Mutex<Option<Progress>>);

/// How far the objects of one CRD are stored again.
#[derive(Clone)]
struct Progress {
    crd: ObjectKey,
    /// Where the next page begins.
    token: Option<String>,
    done: usize,
    /// The page of the current reconcile: where the page after it begins, and how many objects it has.
    current: Option<(Option<String>, usize)>,
}

impl StoragePages {
    /// The next page of the first CRD whose objects are stored again.
    pub(crate) async fn read(&self, client: &Client, observed: &Observed) -> Result<Option<StoragePage>, Failure> {
        let Some((crd, migration)) = next_migration(observed) else {
            *self.0.lock() = None;
            return Ok(None);
        };
        let known = self.0.lock().clone().filter(|known| known.crd == *crd);
        let mut progress = known.unwrap_or(Progress { crd: crd.clone(), token: None, done: 0, current: None });
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &migration.resource);
        let page = |token: Option<String>| ListParams { continue_token: token, ..ListParams::default().limit(PAGE) };
        let mut listed = api.list_metadata(&page(progress.token.clone())).await;
        if matches!(&listed, Err(kube::Error::Api(status)) if status.code == EXPIRED) {
            (progress.token, progress.done) = (None, 0);
            listed = api.list_metadata(&page(None)).await;
        }
        let target = || Target::new(migration.resource.clone(), ObjectKey::cluster(""));
        let list = listed.map_err(|error| classify(&error, "list", &target()))?;
        let next = list.metadata.continue_.filter(|token| !token.is_empty());
        let objects: Vec<(ObjectKey, String)> = list
            .items
            .iter()
            .map(|object| (ObjectKey::from_metadata(&object.metadata), object.metadata.uid.clone().unwrap_or_default()))
            .collect();
        let remaining = list.metadata.remaining_item_count.and_then(|count| usize::try_from(count).ok());
        let page = StoragePage {
            crd: crd.clone(),
            done: progress.done,
            remaining: remaining.unwrap_or_default(),
            is_last: next.is_none(),
            objects,
        };
        progress.current = Some((next, page.objects.len()));
        *self.0.lock() = Some(progress);
        Ok(Some(page))
    }

    /// After a reconcile: the next page follows if this one was stored.
    pub(crate) fn advance(&self, outcome: &Outcome) {
        let is_stored = matches!(&outcome.stop, Stop::Waiting { wait, .. } if wait.reason == STORAGE_WAIT);
        let mut known = self.0.lock();
        let Some(progress) = known.as_mut() else { return };
        if let Some((token, count)) = progress.current.take().filter(|_| is_stored) {
            // After the last page the CRD is read again.
            progress.done = if token.is_some() { progress.done + count } else { 0 };
            progress.token = token;
        }
    }
}

#[cfg(test)]
mod tests {
    use vitivirt_api::Wait;

    use super::*;

    fn after(stop: Stop, next: Option<&str>) -> (Option<String>, usize) {
        let progress = Progress {
            crd: ObjectKey::cluster("crd"),
            token: Some("this".to_owned()),
            done: 500,
            current: Some((next.map(str::to_owned), 500)),
        };
        let pages = StoragePages(Mutex::new(Some(progress)));
        pages.advance(&Outcome { stop, written: 500 });
        let progress = pages.0.lock().clone().unwrap();
        (progress.token, progress.done)
    }

    #[test]
    fn the_next_page_follows_only_if_this_one_was_stored() {
        let wait = |reason| Stop::Waiting {
            step: "storage",
            wait: Wait { reason, message: String::new(), requeue_after: None },
        };
        assert_eq!(after(wait(STORAGE_WAIT), Some("next")), (Some("next".to_owned()), 1000));
        assert_eq!(after(wait(STORAGE_WAIT), None), (None, 0));
        assert_eq!(after(wait("Other"), Some("next")), (Some("this".to_owned()), 500));
        let failure = Failure::transient("Timeout", "x");
        assert_eq!(after(Stop::Failed { step: "storage", failure }, Some("next")), (Some("this".to_owned()), 500));
    }
}
