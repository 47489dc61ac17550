{{/* Dynamic resource allocation. Argument: root context, component, number of devices. */}}
{{- define "headrace.claimTemplate" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: {{ include "headrace.fullname" $root }}-{{ $component }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "headrace.labels" (list $root $component) | nindent 4 }}
spec:
  spec:
    devices:
      requests:
        - name: gpus
          exactly:
            deviceClassName: {{ (get $root.Values $component).resourceClaim.deviceClassName }}
            allocationMode: ExactCount
            count: {{ index . 2 }}
{{- end -}}
