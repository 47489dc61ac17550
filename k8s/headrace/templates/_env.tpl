{{/* Variables of one component, before those that all have. Argument: list of the root context and the component. */}}

{{- define "headrace.coordinatorEnv" -}}
{{ include "headrace.elasticEnv" (index . 0) }}
{{ include "headrace.env" . }}
{{- end -}}

{{/* Nodes of the learner come and go, and meet at the coordinator. */}}
{{- define "headrace.elasticEnv" -}}
- {name: HEADRACE__LEARNER__ELASTIC__MIN_NODES, value: {{ .Values.learner.minNodes | quote }}}
- {name: HEADRACE__LEARNER__ELASTIC__MAX_NODES, value: {{ .Values.learner.maxNodes | quote }}}
- {name: HEADRACE__LEARNER__ELASTIC__STORE_HOST, value: {{ include "headrace.fullname" . }}-coordinator}
- {name: HEADRACE__LEARNER__ELASTIC__STORE_PORT, value: {{ .Values.coordinator.storePort | quote }}}
# A node finishes its step and saves within the pod's grace period.
- {name: HEADRACE__LEARNER__ELASTIC__GRACE_S, value: {{ max 1 (sub (int .Values.learner.terminationGracePeriodSeconds) 10) | quote }}}
{{- end -}}

{{- define "headrace.generatorEnv" -}}
- {name: HEADRACE_GENERATOR_ID, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{ include "headrace.env" . }}
{{- end -}}

{{- define "headrace.learnerEnv" -}}
{{- $root := index . 0 -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
# Where generators fetch the weights, whichever node has rank 0.
- {name: HEADRACE__WEIGHTS__HOST, value: $(POD_IP)}
- {name: HEADRACE__LEARNER__RANKS, value: {{ include "headrace.learnerRanks" $root | quote }}}
{{ include "headrace.elasticEnv" $root }}
{{ include "headrace.env" . }}
{{- end -}}
