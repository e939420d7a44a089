{{- define "sluice.name" -}}
{{- if contains "sluice" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-sluice" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.account" -}}
{{- .Values.serviceAccount.name | default (include "sluice.name" .) -}}
{{- end -}}

{{- define "sluice.selector" -}}
app.kubernetes.io/name: sluice-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What a Prometheus operator selects monitors and rules by. */}}
{{- define "sluice.monitoring" -}}
{{- mergeOverwrite dict (default dict .Values.monitoring.labels) (include "sluice.labels" . | fromYaml) | toYaml -}}
{{- end -}}

{{/*
What the operator does in a namespace that it serves: every verb is used, none is spare.
OpenShift lets only who may delete a child put back its owner reference.
A server-side apply of something new needs create and patch. Secrets are read by name only;
Services, Deployments and Jobs too, before the first write, as one of that name may be somebody else's.
A batch reads the service that answers it by name.
*/}}
{{- define "sluice.rules" -}}
- apiGroups: [sluice.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [sluice.dev]
  resources: [inferencebatches]
  verbs: [list, watch]
- apiGroups: [sluice.dev]
  resources: [inferenceservices/status, inferencebatches/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch{{ if .Values.openshift }}, delete{{ end }}]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch{{ if .Values.openshift }}, delete{{ end }}]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch{{ if .Values.openshift }}, delete{{ end }}]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch{{ if .Values.openshift }}, delete{{ end }}]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch{{ if .Values.openshift }}, delete{{ end }}]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, create, patch{{ if .Values.openshift }}, delete{{ end }}]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch{{ if .Values.openshift }}, delete{{ end }}]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
