//! Phases and modes of Kubernetes objects as enums.
//!
//! Every enum has a variant for values that it does not know, so that a newer Kubernetes, KubeVirt or operator cannot
//! make an object unreadable.

/// An enum whose variants are one string each. The last variant stands for every other string.
macro_rules! string_enum {
    ($(#[$attribute:meta])* $name:ident { $($variant:ident = $text:literal),+ $(,)? } else $unknown:ident = $shown:literal) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($variant,)+
            $unknown,
        }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$variant,)+ Self::$unknown];

            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                    Self::$unknown => $shown,
                }
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                match text {
                    $($text => Self::$variant,)+
                    _ => Self::$unknown,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

string_enum! {
    /// `status.phase` of a Machine.
    MachinePhase {
        Pending = "Pending",
        Creating = "Creating",
        Running = "Running",
        Stopped = "Stopped",
        Failed = "Failed",
    } else Unknown = "Unknown"
}

string_enum! {
    /// `status.phase` of a VirtualMachineInstance. It is empty until virt-controller sets it.
    VmiPhase {
        Unset = "",
        Pending = "Pending",
        Scheduling = "Scheduling",
        Scheduled = "Scheduled",
        WaitingForSync = "WaitingForSync",
        Running = "Running",
        Succeeded = "Succeeded",
        Failed = "Failed",
    } else Unknown = "Unknown"
}

string_enum! {
    /// `status.printableStatus` of a VirtualMachine. It is empty until virt-controller sets it.
    PrintableStatus {
        Unset = "",
        Stopped = "Stopped",
        Provisioning = "Provisioning",
        Starting = "Starting",
        Running = "Running",
        Paused = "Paused",
        Stopping = "Stopping",
        Terminating = "Terminating",
        CrashLoopBackOff = "CrashLoopBackOff",
        Migrating = "Migrating",
        ErrorUnschedulable = "ErrorUnschedulable",
        ErrImagePull = "ErrImagePull",
        ImagePullBackOff = "ImagePullBackOff",
        ErrorPvcNotFound = "ErrorPvcNotFound",
        DataVolumeError = "DataVolumeError",
        WaitingForVolumeBinding = "WaitingForVolumeBinding",
        WaitingForReceiver = "WaitingForReceiver",
    } else Unknown = "Unknown"
}

string_enum! {
    /// `status.phase` of a PersistentVolumeClaim.
    PvcPhase {
        Pending = "Pending",
        Bound = "Bound",
        Lost = "Lost",
    } else Unknown = ""
}

string_enum! {
    /// An access mode of a PersistentVolumeClaim.
    AccessMode {
        ReadWriteOnce = "ReadWriteOnce",
        ReadWriteMany = "ReadWriteMany",
        ReadOnlyMany = "ReadOnlyMany",
        ReadWriteOncePod = "ReadWriteOncePod",
    } else Unknown = ""
}

string_enum! {
    /// The volume mode of a PersistentVolumeClaim.
    VolumeMode {
        Filesystem = "Filesystem",
        Block = "Block",
    } else Unknown = ""
}

impl serde::Serialize for MachinePhase {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> serde::Deserialize<'de> for MachinePhase {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        Ok(Self::from(&*text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_is_read_back_from_its_text() {
        for phase in MachinePhase::ALL {
            let json = serde_json::to_string(phase).unwrap();
            assert_eq!(serde_json::from_str::<MachinePhase>(&json).unwrap(), *phase, "{json}");
        }
        for status in PrintableStatus::ALL {
            assert_eq!(PrintableStatus::from(status.as_str()), *status);
        }
    }

    #[test]
    fn an_unknown_value_is_readable() {
        assert_eq!(serde_json::from_str::<MachinePhase>("\"Dreaming\"").unwrap(), MachinePhase::Unknown);
        assert_eq!(VmiPhase::from("Dreaming"), VmiPhase::Unknown);
        assert_eq!(PvcPhase::from(""), PvcPhase::Unknown);
    }
}
