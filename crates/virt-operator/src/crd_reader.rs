//! Reads a CRD before the operator changes it. CRDs are large and are watched as metadata only, so each of them is read
//! once: when a release is installed over another one, and when another client has changed the CRD.

use std::collections::BTreeMap;

use futures::{StreamExt, TryStreamExt, stream};
use kube::Client;
use parking_lot::Mutex;
use vitivirt_api::{Failure, ObjectKey, Target};
use vitivirt_install::{CrdCheck, Desired, Kind, LiveCrd, Observed, check_crd, crds_to_check};
use vitivirt_runtime::reconcile::classify;

/// A CRD has up to a megabyte.
const READS_AT_ONCE: usize = 2;

#[derive(Default)]
pub(crate) struct CrdReader(Mutex<BTreeMap<ObjectKey, KnownCrd>>);

#[derive(Clone)]
struct KnownCrd {
    uid: String,
    generation: i64,
    /// The deployment for which it was checked.
    deployment: String,
    check: CrdCheck,
}

impl CrdReader {
    /// The CRDs that the next plan writes, and those that an earlier one could not write completely.
    pub(crate) async fn check(
        &self,
        client: &Client,
        observed: &Observed,
        desired: &Desired,
    ) -> Result<BTreeMap<ObjectKey, CrdCheck>, Failure> {
        let Some((installation, _)) = desired.compared() else { return Ok(BTreeMap::new()) };
        let deployment = &installation.config.id;
        let live = |crd: &ObjectKey| observed.objects.get(Kind::CustomResourceDefinition, crd);
        let is_current = |crd: &ObjectKey, known: &KnownCrd| {
            let is_same = |generation: i64| generation == known.generation || !known.check.is_open();
            known.deployment == *deployment
                && live(crd).is_some_and(|live| live.uid == known.uid && is_same(live.generation))
        };
        let open: Vec<ObjectKey> = {
            let mut known = self.0.lock();
            known.retain(|crd, known| known.deployment == *deployment && live(crd).is_some());
            known.iter().filter(|(_, known)| known.check.is_open()).map(|(crd, _)| crd.clone()).collect()
        };
        let written = crds_to_check(observed, desired).into_iter().map(|(crd, _)| crd);
        let mut due: Vec<ObjectKey> = written.chain(open).collect();
        due.sort();
        due.dedup();
        // The status changes without a new generation, so a CRD with a stored version that would be lost is always read
        // again.
        let is_due = |crd: &ObjectKey, known: &KnownCrd| !is_current(crd, known) || known.check.depends_on_status();
        due.retain(|crd| self.0.lock().get(crd).is_none_or(|known| is_due(crd, known)));
        let reads = due.into_iter().map(|crd| async move {
            let read = read(client, &crd).await?;
            let check = check_crd(desired, &crd, &read)?;
            Ok::<_, Failure>((crd, check))
        });
        let checks: Vec<(ObjectKey, CrdCheck)> =
            stream::iter(reads).buffer_unordered(READS_AT_ONCE).try_collect().await?;
        let mut known = self.0.lock();
        for (crd, check) in checks {
            if let Some(live) = live(&crd) {
                let (uid, generation) = (live.uid.clone(), live.generation);
                known.insert(crd, KnownCrd { uid, generation, deployment: deployment.clone(), check });
            }
        }
        Ok(known.iter().map(|(crd, known)| (crd.clone(), known.check.clone())).collect())
    }
}

/// Only the fields that are checked: the schemas are skipped while the response is parsed.
async fn read(client: &Client, crd: &ObjectKey) -> Result<LiveCrd, Failure> {
    let resource = Kind::CustomResourceDefinition.resource();
    let path = format!("/apis/{}/{}/{}", resource.api_version, resource.plural, crd.name());
    let failed = |error: &kube::Error| classify(error, "get", &Target::new(resource.clone(), crd.clone()));
    let request = http::Request::get(path).body(Vec::new());
    let request = request.map_err(|error| failed(&kube::Error::HttpError(error)))?;
    client.request::<LiveCrd>(request).await.map_err(|error| failed(&error))
}
