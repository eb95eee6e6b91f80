//! Secret and ConfigMap volumes of real processes, written and updated as a kubelet does: files are links through
//! `..data`, and one rename replaces all of them, so that a certificate always matches its key.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ConfigMap, KeyToPath, Pod, Secret, Volume};
use kube::{Api, Client, ResourceExt, runtime::watcher};

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
    folder: PathBuf,
}

/// Creates every mount point of the pod's first container, writes the files of Secrets and ConfigMaps, and returns
/// tasks that update them. The tasks run until they are dropped.
pub(crate) async fn mount(client: &Client, pod: &Pod, root: &Path) -> Result<tokio::task::JoinSet<()>> {
    let mut tasks = tokio::task::JoinSet::new();
    let namespace = pod.namespace().unwrap_or_default();
    for mounted in volumes(pod, root)? {
        let selector = |name: &str| watcher::Config::default().fields(&format!("metadata.name={name}"));
        let folder = mounted.folder.clone();
        let items = mounted.items;
        match mounted.source {
            VolumeContent::Secret(name) => {
                let api: Api<Secret> = Api::namespaced(client.clone(), &namespace);
                if let Some(secret) = api.get_opt(&name).await? {
                    write(&folder, &select(secret_files(secret), items.as_deref()))?;
                }
                tasks.spawn(async move {
                    watch_events(api, selector(&name), |event| refresh(event, secret_files, &folder, items.as_deref()))
                        .await;
                });
            }
            VolumeContent::ConfigMap(name) => {
                let api: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
                if let Some(map) = api.get_opt(&name).await? {
                    write(&folder, &select(config_map_files(map), items.as_deref()))?;
                }
                tasks.spawn(async move {
                    watch_events(api, selector(&name), |event| {
                        refresh(event, config_map_files, &folder, items.as_deref());
                    })
                    .await;
                });
            }
        }
    }
    Ok(tasks)
}

fn refresh<K>(event: watcher::Event<K>, files: fn(K) -> VolumeFiles, folder: &Path, items: Option<&[KeyToPath]>) {
    if let watcher::Event::Apply(object) | watcher::Event::InitApply(object) = event
        && let Err(error) = write(folder, &select(files(object), items))
    {
        tracing::warn!("updating {}: {error:#}", folder.display());
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
        if let Some((source, items)) = contents(volume) {
            mounted.push(MountedVolume { source, items, folder });
        }
    }
    Ok(mounted)
}

fn contents(volume: &Volume) -> Option<(VolumeContent, Option<Vec<KeyToPath>>)> {
    if let Some(secret) = &volume.secret {
        return Some((VolumeContent::Secret(secret.secret_name.clone()?), secret.items.clone()));
    }
    let map = volume.config_map.as_ref()?;
    Some((VolumeContent::ConfigMap(map.name.clone()), map.items.clone()))
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

    #[test]
    fn items_select_and_rename_keys() {
        let files: VolumeFiles = [("a".to_owned(), b"1".to_vec()), ("b".to_owned(), b"2".to_vec())].into();
        let items = [KeyToPath { key: "a".to_owned(), path: "x".to_owned(), mode: None }];
        assert_eq!(select(files, Some(&items)), [("x".to_owned(), b"1".to_vec())].into());
    }
}
