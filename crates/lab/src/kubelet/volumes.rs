//! Secret and ConfigMap volumes of real processes, written and updated as a kubelet does: files are links through
//! `..data`, and one rename replaces all of them, so that a certificate always matches its key.

use std::{
    collections::{BTreeMap, HashSet},
    fmt::Debug,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{ConfigMap, KeyToPath, Pod, Secret, Volume};
use kube::{Api, Client, ResourceExt, runtime::watcher};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::{sync::watch, task::JoinSet};

use super::PodBehaviour;
use crate::object_watch::watch_events;

type VolumeFiles = BTreeMap<String, Vec<u8>>;

enum VolumeContent {
    Secret(String),
    ConfigMap(String),
}

/// A volume, and the folder in the pod's root where the container mounts it.
struct MountedVolume {
    source: VolumeContent,
    items: Option<Vec<KeyToPath>>,
    optional: bool,
    folder: PathBuf,
}

/// The pods whose volumes are no longer updated, by UID.
#[derive(Clone, Default)]
pub(crate) struct FrozenPods(Arc<Mutex<HashSet<String>>>);

impl FrozenPods {
    pub(crate) fn add(&self, uid: String) {
        self.0.lock().insert(uid);
    }
}

/// When the volumes of one pod are updated.
#[derive(Clone)]
pub(crate) struct VolumeUpdates {
    pub(super) behaviour: watch::Receiver<PodBehaviour>,
    pub(super) seed: u64,
    pub(super) frozen: FrozenPods,
    /// A kubelet updates the volumes of all its pods at the same interval.
    pub(super) node: String,
    pub(super) uid: String,
}

impl VolumeUpdates {
    fn delay(&self) -> Duration {
        self.behaviour.borrow().volumes_updated_after.pick(self.seed, "volumes", &self.node)
    }

    fn is_frozen(&self) -> bool {
        self.frozen.0.lock().contains(&self.uid)
    }
}

/// Creates every mount point of the pod's first container, writes the files of Secrets and ConfigMaps, and returns
/// tasks that update them. The tasks run until they are dropped.
pub(crate) async fn mount(client: &Client, pod: &Pod, root: &Path, updates: &VolumeUpdates) -> Result<JoinSet<()>> {
    let mut tasks = JoinSet::new();
    let namespace = pod.namespace().unwrap_or_default();
    for volume in volumes(pod, root)? {
        match &volume.source {
            VolumeContent::Secret(name) => {
                let api: Api<Secret> = Api::namespaced(client.clone(), &namespace);
                mount_volume(api, name.clone(), secret_files, volume, updates.clone(), &mut tasks).await?;
            }
            VolumeContent::ConfigMap(name) => {
                let api: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
                mount_volume(api, name.clone(), config_map_files, volume, updates.clone(), &mut tasks).await?;
            }
        }
    }
    Ok(tasks)
}

async fn mount_volume<K>(
    api: Api<K>,
    name: String,
    files: fn(K) -> VolumeFiles,
    volume: MountedVolume,
    updates: VolumeUpdates,
    tasks: &mut JoinSet<()>,
) -> Result<()>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let written = match api.get_opt(&name).await? {
        Some(object) => {
            let files = select(files(object), volume.items.as_deref());
            write(&volume.folder, &files)?;
            Some(files)
        }
        None if volume.optional => None,
        None => bail!("{} {name} not found", K::kind(&())),
    };
    tasks.spawn(async move {
        let (sender, newest) = watch::channel(written.clone());
        let this_object = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let watching = watch_events(api, this_object, |event| {
            if let watcher::Event::Apply(object) | watcher::Event::InitApply(object) = event {
                sender.send_replace(Some(select(files(object), volume.items.as_deref())));
            }
        });
        tokio::select! {
            () = watching => {}
            () = update(&volume.folder, written, newest, &updates) => {}
        }
    });
    Ok(())
}

/// Writes the newest files with the delay of the kubelet. Changes during the delay are written with the first one.
async fn update(
    folder: &Path,
    mut written: Option<VolumeFiles>,
    mut newest: watch::Receiver<Option<VolumeFiles>>,
    updates: &VolumeUpdates,
) {
    while newest.wait_for(|files| *files != written).await.is_ok() {
        tokio::time::sleep(updates.delay()).await;
        if updates.is_frozen() {
            return;
        }
        written.clone_from(&newest.borrow_and_update());
        let files = written.clone().unwrap_or_default();
        if let Err(error) = write(folder, &files) {
            tracing::warn!("updating {}: {error:#}", folder.display());
        }
    }
}

fn volumes(pod: &Pod, root: &Path) -> Result<Vec<MountedVolume>> {
    let spec = pod.spec.clone().unwrap_or_default();
    let mounts = spec.containers.first().and_then(|container| container.volume_mounts.clone()).unwrap_or_default();
    let mut mounted = Vec::new();
    for mount in mounts {
        let folder = root.join(mount.mount_path.trim_start_matches('/'));
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let Some(volume) = spec.volumes.iter().flatten().find(|volume| volume.name == mount.name) else { continue };
        mounted.extend(mounted_volume(volume, folder));
    }
    Ok(mounted)
}

fn mounted_volume(volume: &Volume, folder: PathBuf) -> Option<MountedVolume> {
    let (source, items, optional) = if let Some(secret) = &volume.secret {
        (VolumeContent::Secret(secret.secret_name.clone()?), &secret.items, secret.optional)
    } else {
        let map = volume.config_map.as_ref()?;
        (VolumeContent::ConfigMap(map.name.clone()), &map.items, map.optional)
    };
    Some(MountedVolume { source, items: items.clone(), optional: optional == Some(true), folder })
}

fn secret_files(secret: Secret) -> VolumeFiles {
    secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect()
}

fn config_map_files(map: ConfigMap) -> VolumeFiles {
    map.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.into_bytes())).collect()
}

fn select(mut files: VolumeFiles, items: Option<&[KeyToPath]>) -> VolumeFiles {
    match items {
        None => files,
        Some(items) => items.iter().filter_map(|item| Some((item.path.clone(), files.remove(&item.key)?))).collect(),
    }
}

/// `..data` points to a folder with the current files; each visible file is a link through it.
fn write(folder: &Path, files: &VolumeFiles) -> Result<()> {
    let data = folder.join("..data");
    let current = std::fs::read_link(&data).ok();
    if current.as_ref().is_some_and(|current| contains_exactly(&folder.join(current), files)) {
        return Ok(());
    }
    let new_folder = tempfile::Builder::new().prefix("..").tempdir_in(folder).context("creating a data folder")?.keep();
    for (name, contents) in files {
        std::fs::write(new_folder.join(name), contents).with_context(|| format!("writing {name}"))?;
    }
    let next = folder.join("..data_tmp");
    let target = new_folder.file_name().context("the data folder has no name")?;
    std::os::unix::fs::symlink(target, &next).context("linking the new data")?;
    std::fs::rename(&next, &data).context("replacing the data")?;
    for name in files.keys() {
        let visible = folder.join(name);
        if !visible.is_symlink() {
            std::os::unix::fs::symlink(Path::new("..data").join(name), &visible)
                .with_context(|| format!("linking {name}"))?;
        }
    }
    if let Some(current) = current {
        let _ = std::fs::remove_dir_all(folder.join(current));
    }
    Ok(())
}

fn contains_exactly(folder: &Path, files: &VolumeFiles) -> bool {
    let count = std::fs::read_dir(folder).map_or(0, Iterator::count);
    count == files.len()
        && files.iter().all(|(name, contents)| std::fs::read(folder.join(name)).is_ok_and(|found| &found == contents))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_are_replaced_together() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let files = |text: &str| -> VolumeFiles {
            ["tls.crt", "tls.key"]
                .into_iter()
                .map(|name| (name.to_owned(), format!("{name} {text}").into_bytes()))
                .collect()
        };
        write(folder.path(), &files("one")).unwrap();
        let first = std::fs::read_link(folder.path().join("..data")).unwrap();
        write(folder.path(), &files("one")).unwrap();
        assert_eq!(
            std::fs::read_link(folder.path().join("..data")).unwrap(),
            first,
            "unchanged files must not be replaced"
        );
        write(folder.path(), &files("two")).unwrap();
        assert_eq!((read("tls.crt"), read("tls.key")), ("tls.crt two".to_owned(), "tls.key two".to_owned()));
        assert!(!folder.path().join(first).exists(), "the old files must be removed");
    }

    #[tokio::test(start_paused = true)]
    async fn changes_are_written_together_after_the_delay_of_the_node() {
        let folder = tempfile::tempdir().unwrap();
        let files = |text: &str| -> VolumeFiles { [("file".to_owned(), text.as_bytes().to_vec())].into() };
        let read = || std::fs::read_to_string(folder.path().join("file")).unwrap();
        let behaviour =
            PodBehaviour { volumes_updated_after: Duration::from_secs(60).into(), ..PodBehaviour::default() };
        let (_sender, behaviour) = watch::channel(behaviour);
        let updates = VolumeUpdates {
            behaviour,
            seed: 1,
            frozen: FrozenPods::default(),
            node: "node-1".to_owned(),
            uid: "u".to_owned(),
        };
        write(folder.path(), &files("one")).unwrap();
        let (sender, newest) = watch::channel(Some(files("one")));
        let change = |seconds: u64, text: &'static str| {
            let sender = sender.clone();
            async move {
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                sender.send_replace(Some(files(text)));
            }
        };
        let (path, pod) = (folder.path().to_owned(), updates.clone());
        tokio::spawn(async move { update(&path, Some(files("one")), newest, &pod).await });
        let (first, second) = (change(10, "two"), change(50, "three"));
        tokio::join!(first, second);
        tokio::time::sleep(Duration::from_secs(19)).await;
        assert_eq!(read(), "one", "69 s after the start and 59 s after the first change");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(read(), "three");
        updates.frozen.add("u".to_owned());
        sender.send_replace(Some(files("four")));
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(read(), "three", "the pod is frozen");
    }

    #[test]
    fn items_select_and_rename_keys() {
        let files: VolumeFiles = [("a".to_owned(), b"1".to_vec()), ("b".to_owned(), b"2".to_vec())].into();
        let items = [KeyToPath { key: "a".to_owned(), path: "x".to_owned(), mode: None }];
        assert_eq!(select(files, Some(&items)), [("x".to_owned(), b"1".to_vec())].into());
    }
}
