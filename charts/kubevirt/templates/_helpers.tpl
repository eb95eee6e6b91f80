{{- /* `helm upgrade --reuse-values` renders with the values of the older chart, which lack newer ones. Sets each missing one to
     its default. */}}
{{- define "kubevirt.setDefaults" -}}
{{- range $name, $default := .Files.Get "files/defaults.yaml" | fromYaml }}
{{- $value := index $.Values $name }}
{{- if kindIs "invalid" $value }}
{{- $_ := set $.Values $name $default }}
{{- end }}
{{- end }}
{{- end }}
